// What the user says becomes text in the field: recorded here, written down by the server. Offered where it can hear.

import { announce } from './announce.js';
import { find, icon } from './element.js';
import { notify } from './notice.js';

export class Dictation {
  // `write(text)` takes what was heard.
  constructor(api, models, write) {
    Object.assign(this, { api, models, write });
    this.button = find('record');
    this.recorder = null;
    this.button.addEventListener('click', () => (this.recorder ? this.recorder.stop() : this.#record()));
    this.draw();
  }

  draw() {
    // A page that is served over plain HTTP in a local network is given no microphone by the browser.
    this.button.hidden = !this.models.hearing || !navigator.mediaDevices;
    const label = this.recorder ? 'Stop recording' : 'Dictate';
    this.button.setAttribute('aria-label', label);
    this.button.title = label;
    this.button.setAttribute('aria-pressed', String(Boolean(this.recorder)));
    this.button.replaceChildren(icon(this.recorder ? 'stop' : 'microphone'));
  }

  async #record() {
    let microphone;
    try {
      microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      notify('The browser gave no microphone.');
      return;
    }
    const pieces = [];
    this.recorder = new MediaRecorder(microphone);
    this.recorder.addEventListener('dataavailable', ({ data }) => pieces.push(data));
    this.recorder.addEventListener('stop', async () => {
      for (const track of microphone.getTracks()) track.stop();
      const { mimeType } = this.recorder;
      this.recorder = null;
      this.draw();
      await this.#hear(new Blob(pieces, { type: mimeType }));
    });
    this.recorder.start();
    this.draw();
    announce('Recording.');
  }

  async #hear(sound) {
    this.button.disabled = true;
    try {
      const text = await this.api.transcribe(sound, this.models.hearing.id);
      if (text.trim()) this.write(text.trim());
      else notify('Nothing was heard.');
    } catch (error) {
      notify(error.message);
    } finally {
      this.button.disabled = false;
    }
  }
}
