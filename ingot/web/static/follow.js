// Keeps the newest text in view while it grows, until the user scrolls up; scrolling back to the end resumes.

const NEAR_PX = 48;

export class Follower {
  constructor(scroller, content, button) {
    this.scroller = scroller;
    this.button = button;
    this.isFollowing = true;
    this.seen = { top: 0, height: 0, room: 0 };
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
    if (this.isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#look();
    this.#show();
  }

  // New text and a new window size move things too; only scrolling up while the sizes stay is the user's doing.
  #scrolled() {
    const before = this.seen;
    const now = this.#look();
    const isSameSize = now.height === before.height && now.room === before.room;
    if (now.top < before.top && isSameSize) this.isFollowing = false;
    else if (now.top > before.top && this.#distance() <= NEAR_PX) this.isFollowing = true;
    this.#show();
  }

  #look() {
    const { scrollTop: top, scrollHeight: height, clientHeight: room } = this.scroller;
    this.seen = { top, height, room };
    return this.seen;
  }

  #show() {
    this.button.hidden = this.isFollowing || this.#distance() <= NEAR_PX;
  }

  #distance() {
    return this.seen.height - this.seen.top - this.seen.room;
  }
}
