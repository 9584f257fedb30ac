// Files for the next message: picked, taken by a phone's camera, pasted or dropped; several at once.

import { announce } from './announce.js';
import { element, find, iconButton } from './element.js';
import { mediumOf, mediumView, wordOf } from './media.js';
import { notify } from './notice.js';
import { t } from './translate.js';

export class Attachments {
  // `changed` is called when a file was added or removed.
  constructor(models, field, changed) {
    Object.assign(this, { models, changed });
    this.list = [];
    this.tray = find('attachments');
    for (const [button, files] of [['attach', 'attach-files'], ['camera', 'camera-files']]) this.#wire(find(button), find(files), field);
    field.addEventListener('paste', (event) => this.#receive(event, event.clipboardData));
    addEventListener('dragover', (event) => this.#hover(event));
    addEventListener('dragleave', ({ relatedTarget }) => relatedTarget ?? this.#mark(false));
    addEventListener('drop', (event) => this.#receive(event, event.dataTransfer));
  }

  // Devices that are touched have a camera that takes pictures.
  draw() {
    find('camera').hidden = !matchMedia('(pointer: coarse)').matches || !this.models.takes('image');
  }

  #wire(button, picker, field) {
    button.addEventListener('click', () => picker.click());
    picker.addEventListener('change', async () => {
      await this.add(picker.files);
      picker.value = ''; // so that the same file can be picked again
      field.focus();
    });
  }

  async add(files) {
    const refused = [];
    for (const file of files) {
      try {
        const medium = await mediumOf(file);
        if (this.models.takes(medium.kind)) this.#keep(medium);
        else refused.push(this.#why(medium));
      } catch (error) {
        refused.push(error.message);
      }
    }
    if (refused.length > 0) notify(refused.join(' '));
    this.#redraw();
  }

  clear() {
    this.list = [];
    this.#redraw();
  }

  #keep(medium) {
    this.list.push({ ...medium, size: medium.blob.size, url: URL.createObjectURL(medium.blob) });
    announce(t('{name} added.', { name: medium.name }));
  }

  // What the model does not take, and what would.
  #why({ kind, name }) {
    const { chosen } = this.models;
    if (kind === 'audio') return t('{name}: audio needs a speech-to-text model. Start the server with --audio-model.', { name });
    const takers = this.models.takers(kind);
    const advice = takers.length > 0 ? t('These do: {models}.', { models: takers.join(', ') }) : t('No model of this server does; one with a vision tower would.');
    return `${t('{model} does not take {name}: it reads no {kind}.', { model: chosen, name, kind: wordOf(kind) })} ${advice}`;
  }

  #redraw() {
    this.tray.hidden = this.list.length === 0;
    this.tray.replaceChildren(...this.list.map((medium) => this.#chip(medium)));
    this.changed();
  }

  #chip(medium) {
    const drop = () => {
      this.list = this.list.filter((each) => each !== medium);
      URL.revokeObjectURL(medium.url);
      this.#redraw();
    };
    return element('li', {}, mediumView(medium, Promise.resolve(medium.url)), iconButton('close', t('Remove {name}', { name: medium.name }), drop));
  }

  #hover(event) {
    if (!event.dataTransfer?.types.includes('Files')) return;
    event.preventDefault();
    this.#mark(true);
  }

  #mark(isOver) {
    find('composer').classList.toggle('over', isOver);
  }

  // The field itself handles pasted and dropped text.
  #receive(event, data) {
    this.#mark(false);
    if (!data?.files.length) return;
    event.preventDefault();
    this.add([...data.files]);
  }
}
