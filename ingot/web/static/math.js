// Math as KaTeX draws it. The library is fetched from this server when the first formula is shown; until then, and where
// it cannot read one, its source is. A selection is copied with the source.

import { element } from './element.js';

const MOST_CHARS = 4000; // of a formula; what is longer stays as it was written
const HOME = new URL('./vendor/katex/', import.meta.url);

let library = null;

export function mathView(tex, source, display) {
  const node = element('span', { class: display ? 'math display' : 'math', 'data-source': source }, source);
  if (tex.length <= MOST_CHARS) loaded().then((katex) => draw(katex, node, tex, display), () => {});
  return node;
}

function draw(katex, node, tex, display) {
  const box = element('span');
  try {
    // Nothing that a formula says may call anyone, grow without end, or leave its line.
    katex.render(tex, box, { displayMode: display, throwOnError: true, trust: false, strict: 'ignore', maxSize: 10, maxExpand: 500 });
  } catch {
    return;
  }
  node.replaceChildren(...box.childNodes);
  node.classList.add('drawn');
}

function loaded() {
  library ??= new Promise((resolve, reject) => {
    document.head.append(element('link', { rel: 'stylesheet', href: new URL('katex.min.css', HOME).href }));
    const onload = () => resolve(window.katex);
    document.head.append(element('script', { src: new URL('katex.min.js', HOME).href, onload, onerror: reject }));
  });
  return library;
}

// What is selected, with the source of formulas in their place, or null where there is none.
function selectedSource(selection) {
  if (selection.isCollapsed || selection.rangeCount === 0) return null;
  const range = selection.getRangeAt(0);
  const around = range.commonAncestorContainer;
  const inside = (around.closest ? around : around.parentElement).closest('.math');
  if (inside) return inside.dataset.source;
  const part = element('div', { class: 'visually-hidden' }, range.cloneContents());
  const formulas = part.querySelectorAll('.math');
  if (formulas.length === 0) return null;
  for (const formula of formulas) formula.replaceWith(formula.dataset.source);
  document.body.append(part); // only what is drawn has lines
  const text = part.innerText;
  part.remove();
  return text;
}

document.addEventListener('copy', (event) => {
  const text = selectedSource(getSelection());
  if (text === null) return;
  event.clipboardData.setData('text/plain', text);
  event.preventDefault();
});
