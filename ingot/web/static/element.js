// Builds DOM nodes. Text always becomes a text node: there is no way in for markup.

const SVG = 'http://www.w3.org/2000/svg';

// Attributes named `onX` are listeners for X; null, undefined and false leave one out.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function svgElement(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// One of the icons at the top of index.html.
export function icon(name) {
  const use = svgElement('use', { href: `#icon-${name}` });
  return svgElement('svg', { class: 'icon', 'aria-hidden': 'true' }, use);
}

export function iconButton(name, label, onclick, attributes = {}) {
  const basics = { type: 'button', class: 'quiet', 'aria-label': label, title: label, onclick };
  return element('button', { ...basics, ...attributes }, icon(name));
}

export function find(id) {
  return document.getElementById(id);
}
