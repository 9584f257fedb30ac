// What is open: the side list and at most one panel. Narrow screens show them over the page, one at a time.

import { find } from './element.js';

const SIDEBAR = 'ingot.sidebar';
const NARROW = '(max-width: 760px)';
const OVERLAY = '(max-width: 1120px)';
const PANELS = ['settings', 'engine'];

export class Layout {
  // `engine` has `open` and `close`, called with its panel.
  constructor(engine) {
    this.engine = engine;
    this.panel = null;
    this.narrow = matchMedia(NARROW);
    this.overlay = matchMedia(OVERLAY);
    this.narrow.addEventListener('change', () => this.#setSidebar(this.#wantsSidebar()));
    this.overlay.addEventListener('change', () => this.#drawScrim());
    find('sidebar-toggle').addEventListener('click', () => this.#toggleSidebar());
    find('scrim').addEventListener('click', () => this.dismiss());
    for (const name of PANELS) this.#wirePanel(name);
    this.#setSidebar(this.#wantsSidebar());
  }

  openPanel(name) {
    if (this.panel === name) return;
    this.closePanel();
    this.panel = name;
    find(name).hidden = false;
    find(`${name}-toggle`).setAttribute('aria-expanded', 'true');
    find(name).querySelector('h2').focus();
    if (name === 'engine') this.engine.open();
    this.#drawScrim();
  }

  closePanel() {
    if (!this.panel) return;
    const hadFocus = find(this.panel).contains(document.activeElement);
    find(this.panel).hidden = true;
    const toggle = find(`${this.panel}-toggle`);
    toggle.setAttribute('aria-expanded', 'false');
    if (hadFocus) toggle.focus();
    if (this.panel === 'engine') this.engine.close();
    this.panel = null;
    this.#drawScrim();
  }

  // After something was chosen in the side list: make room for it where the list covers the page.
  closeSidebarIfOver() {
    if (this.narrow.matches) this.#setSidebar(false);
  }

  // Closes what lies on top; returns whether there was anything.
  dismiss() {
    if (this.panel) this.closePanel();
    else if (this.narrow.matches && this.isSidebarOpen) {
      this.#setSidebar(false);
      find('sidebar-toggle').focus();
    } else return false;
    return true;
  }

  #wirePanel(name) {
    find(`${name}-toggle`).addEventListener('click', () => {
      if (this.panel === name) this.closePanel();
      else this.openPanel(name);
    });
    find(name).querySelector('.close').addEventListener('click', () => this.closePanel());
  }

  #wantsSidebar() {
    return !this.narrow.matches && localStorage.getItem(SIDEBAR) !== 'closed';
  }

  #toggleSidebar() {
    this.#setSidebar(!this.isSidebarOpen);
    if (!this.narrow.matches) localStorage.setItem(SIDEBAR, this.isSidebarOpen ? 'open' : 'closed');
    else if (this.isSidebarOpen) find('new-chat').focus();
  }

  #setSidebar(isOpen) {
    this.isSidebarOpen = isOpen;
    document.body.dataset.sidebar = isOpen ? 'open' : 'closed';
    find('sidebar-toggle').setAttribute('aria-expanded', String(isOpen));
    this.#drawScrim();
  }

  #drawScrim() {
    const covers = (this.narrow.matches && this.isSidebarOpen) || (this.overlay.matches && this.panel !== null);
    find('scrim').hidden = !covers;
  }
}
