// What is asked for again when something has changed, but not more often than once in a while; and what was asked for last.

/** Asks as `ask` does. Null: something was asked for since, which tells of later, or of another page. */
export function lastOf(ask) {
  let asked = 0;
  return async (...given) => {
    const mine = ++asked;
    const found = await ask(...given);
    return mine === asked ? found : null;
  };
}

export class Again {
  #timer = null;
  #last = 0;

  /** `ask`: what to do; a failure of it is passed over, as the stream tells of the connection. `seen`: what is known. */
  constructor(ask, pauseMs, seen) {
    Object.assign(this, { ask, pauseMs, seen });
  }

  /** `sign`: what changes with it. */
  note(sign) {
    if (sign === this.seen) return;
    this.seen = sign;
    this.#timer ??= setTimeout(() => this.now(), Math.max(200, this.#last + this.pauseMs - performance.now()));
  }

  async now() {
    this.close();
    this.#last = performance.now();
    try {
      await this.ask();
    } catch {
      // What is shown stays.
    }
  }

  close() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }
}
