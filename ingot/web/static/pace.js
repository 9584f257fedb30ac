// Draws at most once a frame, and rarer when drawing is slow: never more than a quarter of the time goes into it.

const REST = 3;

export class Pace {
  constructor(draw) {
    this.draw = draw;
    this.isPending = false;
    this.rest = 0;
    this.drawn = 0;
  }

  request() {
    if (this.isPending) return;
    this.isPending = true;
    const wait = this.drawn + this.rest - performance.now();
    const frame = () => requestAnimationFrame(() => this.#run());
    if (wait > 16) setTimeout(frame, wait);
    else frame();
  }

  #run() {
    if (!this.isPending) return;
    this.isPending = false;
    const start = performance.now();
    this.draw();
    this.drawn = performance.now();
    this.rest = REST * (this.drawn - start);
  }

  // Draws now what would have been drawn later.
  flush() {
    this.isPending = false;
    this.draw();
  }
}
