// The one state of the page: what is known of the server, the conversations, and what is on screen. Whoever changes it
// says so with `change`, and every pane that `watch` was given redraws itself from it. Text that streams in is not part
// of this: an answer's own view follows it.

const CHOSEN = 'ingot.model';

export class State {
  constructor() {
    this.models = []; // what the server says of each of its models
    this.modelsError = null; // why it could not be asked
    this.chosen = localStorage.getItem(CHOSEN); // the id of the model that answers
    this.mayChange = false; // the key may load and unload models
    this.current = null; // the conversation on screen
    this.answers = new Map(); // those under way, by conversation
    this.draws = new Set();
  }

  // `draw` is called now and after every change.
  watch(draw) {
    this.draws.add(draw);
    draw();
  }

  change(values = {}) {
    Object.assign(this, values);
    if ('chosen' in values) localStorage.setItem(CHOSEN, values.chosen);
    for (const draw of this.draws) draw();
  }
}
