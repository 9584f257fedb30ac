// Puts the page together: which part listens to which.

import { Api } from './api.js';
import { Chat } from './chat.js';
import { Composer } from './composer.js';
import { find } from './element.js';
import { EngineView } from './engine.js';
import { KeyDialog } from './keydialog.js';
import { Layout } from './layout.js';
import { Models } from './models.js';
import { notify } from './notice.js';
import { Settings } from './settings.js';
import { Sidebar } from './sidebar.js';
import { Speaker } from './speaker.js';
import { Store } from './store.js';
import { Transcript } from './transcript.js';
import { welcome } from './welcome.js';

const dialog = new KeyDialog();
const api = new Api(async (wasRefused) => {
  const key = await dialog.ask(wasRefused);
  if (key) api.key = key;
  find('key').value = api.key;
  return Boolean(key);
});
const models = new Models(api);
const layout = new Layout(new EngineView(api));
const store = new Store(() => notify('The browser’s storage is full: this conversation is not being saved.'));
const settings = new Settings(api, {
  onSystem: (text) => chat.setSystem(text),
  onKey: () => connect(),
  reveal: () => layout.openPanel('settings'),
});
const chat = new Chat({ api, store, settings, models });

// The button that was used goes away with its message, so the focus goes where the next words are written.
const thenFocus = (action) => (...details) => {
  action(...details);
  composer.focus();
};
const speaker = new Speaker(api, models);
const transcript = new Transcript(
  {
    edit: thenFocus((message, text) => chat.edit(message, text)),
    retry: thenFocus((message) => chat.retry(message)),
    remove: thenFocus((message) => {
      speaker.stop();
      chat.remove(message);
    }),
    speaker,
  },
  () => welcome(models),
);
chat.attach(transcript);
const composer = new Composer(api, chat, models, transcript);
new Sidebar(chat, () => layout.closeSidebarIfOver());

const showSystem = () => settings.showSystem(chat.current.system);
chat.addEventListener('change', showSystem);
showSystem();

async function connect() {
  await models.load();
  settings.recommend(models.card?.default_sampling_params);
  transcript.refresh();
  transcript.offer();
  composer.attachments.draw();
  composer.dictation.draw();
  composer.draw();
}

// A server that was away, or wanted a key, may be there now.
chat.addEventListener('change', () => models.error && !chat.isAnswering && chat.lastSucceeded && connect());
addEventListener('focus', () => models.error?.status === 0 && connect());

addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.defaultPrevented || document.querySelector('dialog[open]')) return;
  if (chat.isAnswering) chat.stop();
  else layout.dismiss();
});
addEventListener('storage', (event) => chat.follow(event));
addEventListener('pagehide', () => {
  speaker.stop();
  chat.leave();
});

composer.focus();
await connect();
