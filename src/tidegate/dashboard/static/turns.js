// Work on many things, a few of them in each frame: whoever scrolls or types meanwhile is not held up by it.

export class Turns {
  #work;
  #size;
  #noteBusy;
  #due = new Set();
  #frame = null;

  /** `work`: what is done with each; `size`: of how many in a frame; `noteBusy(isBusy)`: whether something is due. */
  constructor(work, size, noteBusy) {
    this.#work = work;
    this.#size = size;
    this.#noteBusy = noteBusy;
  }

  /** What is due already keeps its place: however often something changes, all have their turn. */
  add(things) {
    for (const each of things) this.#due.add(each);
    this.#noteBusy(this.#due.size > 0);
    if (this.#due.size) this.#frame ??= requestAnimationFrame(() => this.#turn());
  }

  clear() {
    this.#due.clear();
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
  }

  #turn() {
    this.#frame = null;
    for (const each of [...this.#due].slice(0, this.#size)) {
      this.#due.delete(each);
      this.#work(each);
    }
    this.add([]);
  }
}
