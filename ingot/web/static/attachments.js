// Images and videos for the next message: picked, pasted or dropped. Offered where the model takes them.

import { announce } from './announce.js';
import { element, find, iconButton } from './element.js';
import { kindOf, mediumOf, mediumView } from './media.js';
import { notify } from './notice.js';

// Fires `change` when one was added or removed.
export class Attachments extends EventTarget {
  constructor(models, field) {
    super();
    this.models = models;
    this.list = [];
    this.tray = find('attachments');
    this.button = find('attach');
    const picker = find('attach-files');
    this.button.addEventListener('click', () => picker.click());
    picker.addEventListener('change', async () => {
      await this.add(picker.files);
      picker.value = ''; // so that the same file can be picked again
      field.focus();
    });
    field.addEventListener('paste', (event) => this.#receive(event, event.clipboardData));
    addEventListener('dragover', (event) => event.dataTransfer.types.includes('Files') && event.preventDefault());
    addEventListener('drop', (event) => this.#receive(event, event.dataTransfer));
    this.draw();
  }

  async add(files) {
    for (const file of files) {
      if (!this.models.takes(kindOf(file))) {
        notify(`${this.models.chosen} does not take ${file.name}.`);
        continue;
      }
      try {
        this.list.push(await mediumOf(file));
        announce(`${file.name} added.`);
      } catch (error) {
        notify(error.message);
      }
    }
    this.#changed();
  }

  clear() {
    this.list = [];
    this.#changed();
  }

  draw() {
    this.button.hidden = !this.models.takes('image');
    this.tray.hidden = this.list.length === 0;
    this.tray.replaceChildren(...this.list.map((medium) => this.#chip(medium)));
  }

  #chip(medium) {
    const drop = () => {
      this.list = this.list.filter((each) => each !== medium);
      this.#changed();
    };
    return element('li', {}, mediumView(medium), iconButton('close', `Remove ${medium.name}`, drop));
  }

  // The field itself handles pasted and dropped text.
  #receive(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.add([...data.files]);
  }

  #changed() {
    this.draw();
    this.dispatchEvent(new Event('change'));
  }
}
