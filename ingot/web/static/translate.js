// What the page says, in the browser's language. The sentences in the code and in the pages are English, and the keys of
// translations.json, which has the other languages. A test wants every sentence to be there in all of them.

const OTHERS = ['es', 'fr', 'zh']; // in the order of the table
const ATTRIBUTES = ['aria-label', 'title', 'placeholder'];

const wanted = navigator.languages.map((tag) => tag.slice(0, 2).toLowerCase());
const known = wanted.find((tag) => tag === 'en' || OTHERS.includes(tag)) ?? 'en';
const table = known === 'en' ? null : await fetched();
export const language = table ? known : 'en';

// A sentence with its {values}.
export function t(text, values = {}) {
  const said = table?.[text]?.[OTHERS.indexOf(language)] ?? text;
  return said.replaceAll(/\{(\w+)\}/g, (mark, name) => values[name] ?? mark);
}

// What is written in the page itself.
export function translatePage() {
  document.documentElement.lang = language;
  if (!table) return;
  const texts = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = swapped(texts.currentNode.data);
  for (const name of ATTRIBUTES) {
    for (const node of document.querySelectorAll(`[${name}]`)) node.setAttribute(name, swapped(node.getAttribute(name)));
  }
}

// A text with the same space around it.
function swapped(text) {
  const key = text.trim().replaceAll(/\s+/g, ' ');
  return table[key] ? text.replace(text.trim(), () => t(key)) : text;
}

async function fetched() {
  try {
    return await (await fetch(new URL('./translations.json', import.meta.url))).json();
  } catch {
    return null;
  }
}
