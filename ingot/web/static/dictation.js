// Dictation into the text field: recorded here, transcribed by the server. Offered where it has a speech-to-text model.

import { announce } from './announce.js';
import { find, icon } from './element.js';
import { notify } from './notice.js';
import { t } from './translate.js';

export class Dictation {
  // `write(text)` takes the transcript.
  constructor(api, models, write) {
    Object.assign(this, { api, models, write });
    this.button = find('record');
    this.recorder = null;
    this.button.addEventListener('click', () => (this.recorder ? this.recorder.stop() : this.#record()));
  }

  draw() {
    // Browsers offer no microphone to pages that are served over plain HTTP in a local network.
    this.button.hidden = !this.models.speechToText || !navigator.mediaDevices;
    const label = this.recorder ? t('Stop recording') : t('Dictate');
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
      notify(t('The browser allows no microphone.'));
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
      await this.#transcribe(new Blob(pieces, { type: mimeType }));
    });
    this.recorder.start();
    this.draw();
    announce(t('Recording.'));
  }

  async #transcribe(audio) {
    this.button.disabled = true;
    try {
      const text = await this.api.transcribe(audio, this.models.speechToText.id);
      if (text.trim()) this.write(text.trim());
      else notify(t('No speech was recognised.'));
    } catch (error) {
      notify(error.message);
    } finally {
      this.button.disabled = false;
    }
  }
}
