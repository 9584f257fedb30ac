// Puts the page together: one state, what changes it, and the panes that are drawn from it.

import { Api } from './api.js';
import { Chat } from './chat.js';
import { Composer } from './composer.js';
import { find } from './element.js';
import { EngineView } from './engine.js';
import { AnswerFormat } from './format.js';
import { KeyDialog } from './keydialog.js';
import { Layout } from './layout.js';
import { Models } from './models.js';
import { notify } from './notice.js';
import { Picker } from './picker.js';
import { Presets } from './presets.js';
import { Settings } from './settings.js';
import { Sidebar } from './sidebar.js';
import { Speaker } from './speaker.js';
import { State } from './state.js';
import { newConversation, openStore } from './store.js';
import { ThinkingChoice } from './thinking.js';
import { Titles } from './titles.js';
import { ToolChoice } from './tools.js';
import { Transcript } from './transcript.js';
import { t, translatePage } from './translate.js';
import { welcome } from './welcome.js';

translatePage();
const dialog = new KeyDialog();
const api = new Api(async (wasRefused) => {
  const key = await dialog.ask(wasRefused);
  if (key) api.key = key;
  find('key').value = api.key;
  return Boolean(key);
});
const state = new State();
state.current = newConversation();
const models = new Models(api, state);
const layout = new Layout(new EngineView(api));
const store = await openStore(() => notify(t('This browser has no room left, or stores nothing: what comes now is not saved.')));
const format = new AnswerFormat();
const tools = new ToolChoice(api, state, models);
const settings = new Settings(api, state, models, format, {
  onSystem: (text) => chat.setSystem(text),
  onKey: () => Promise.all([models.load(), tools.load()]),
  reveal: () => layout.openPanel('settings'),
});
const titles = new Titles(api, models);
const thinking = new ThinkingChoice(state, models);
const chat = new Chat({ api, state, store, settings, models, titles, parts: [thinking, format, tools] });
new Presets({
  use: ({ system, sampling }) => {
    chat.setSystem(system);
    settings.use(sampling);
  },
  current: () => ({ system: chat.current.system, sampling: settings.sampling() }),
});
find('titles').checked = titles.isOn;
find('titles').addEventListener('change', ({ target }) => (titles.isOn = target.checked));

// The button that was used goes away with its message, so the focus goes where the next words are written.
const thenFocus = (action) => (...details) => {
  action(...details);
  composer.focus();
};
const speaker = new Speaker(api, models);
const transcript = new Transcript(
  state,
  {
    edit: thenFocus((message, text) => chat.edit(message, text)),
    retry: thenFocus((message) => chat.retry(message)),
    remove: thenFocus((message) => {
      speaker.stop();
      chat.remove(message);
    }),
    branch: thenFocus((message) => chat.branch(message)),
    show: (message) => chat.show(message),
    decide: thenFocus((message, request, isAllowed) => chat.decide(message, request, isAllowed)),
    loading: () => models.loading,
    url: (medium) => store.url(medium),
    speaker,
  },
  () => welcome(models),
);
const composer = new Composer({ api, state, store, chat, models, transcript });
new Picker(state, models);
new Sidebar(state, chat, () => layout.closeSidebarIfOver());
chat.attach(transcript);

// A server that was away may be there now.
addEventListener('focus', () => models.error?.status === 0 && models.load());
addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.defaultPrevented || document.querySelector('dialog[open], [popover]:popover-open')) return;
  if (chat.isAnswering) chat.stop();
  else layout.dismiss();
});
addEventListener('pagehide', () => speaker.stop());

// Installed as an app, the page opens without its server. Browsers have service workers on secure origins only.
navigator.serviceWorker?.register('worker.js').catch(() => {});

composer.focus();
await Promise.all([models.load(), tools.load()]);
