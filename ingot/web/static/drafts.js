// What was written and not sent, of each conversation: it survives leaving the conversation and the page.

const KEY = 'ingot.drafts';
const NEW = 'new'; // of the conversation that is not stored yet

export class Drafts {
  constructor() {
    try {
      this.texts = new Map(Object.entries(JSON.parse(localStorage.getItem(KEY)) ?? {}));
    } catch {
      this.texts = new Map();
    }
  }

  get(conversation) {
    return this.texts.get(keyOf(conversation)) ?? '';
  }

  set(conversation, text) {
    if (text) this.texts.set(keyOf(conversation), text);
    else this.texts.delete(keyOf(conversation));
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(this.texts)));
  }

}

function keyOf({ id, messages }) {
  return messages.length > 0 ? id : NEW;
}
