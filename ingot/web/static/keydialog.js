// Asks for the API key when the server wants one. Requests that meet a 401 together share one question.

import { find } from './element.js';

export class KeyDialog {
  constructor() {
    this.dialog = find('key-dialog');
    this.field = find('key-dialog-field');
    this.answer = null;
    find('key-dialog-cancel').addEventListener('click', () => this.dialog.close(''));
  }

  // Resolves to the key, or to '' when the user would rather not.
  ask(wasRefused) {
    this.answer ??= this.#open(wasRefused).finally(() => (this.answer = null));
    return this.answer;
  }

  #open(wasRefused) {
    find('key-dialog-refused').hidden = !wasRefused;
    this.field.value = '';
    this.dialog.returnValue = '';
    this.dialog.showModal();
    return new Promise((resolve) => {
      const done = () => resolve(this.dialog.returnValue === 'use' ? this.field.value.trim() : '');
      this.dialog.addEventListener('close', done, { once: true });
    });
  }
}
