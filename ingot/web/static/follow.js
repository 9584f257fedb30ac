// Keeps the newest text in view while it grows, until the user scrolls up; scrolling back to the end resumes.

const NEAR_PX = 48;

export class Follower {
  constructor(scroller, content, button) {
    this.scroller = scroller;
    this.button = button;
    this.isFollowing = true;
    this.top = 0;
    scroller.addEventListener('scroll', () => this.#scrolled(), { passive: true });
    button.addEventListener('click', () => this.jump());
    const observer = new ResizeObserver(() => this.#grown());
    observer.observe(content);
    observer.observe(scroller);
  }

  jump() {
    this.isFollowing = true;
    this.#grown();
  }

  #grown() {
    if (this.isFollowing) {
      this.scroller.scrollTop = this.scroller.scrollHeight;
      this.top = this.scroller.scrollTop;
    }
    this.#show();
  }

  // Text that arrives between a scroll and its event also leaves the end out of view; only going up lets go.
  #scrolled() {
    const { scrollTop } = this.scroller;
    if (this.#distance() <= NEAR_PX) this.isFollowing = true;
    else if (scrollTop < this.top) this.isFollowing = false;
    this.top = scrollTop;
    this.#show();
  }

  #show() {
    this.button.hidden = this.isFollowing || this.#distance() <= NEAR_PX;
  }

  #distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }
}
