// What is live: server-sent events, read with fetch, because an EventSource cannot send the token's header.
//
// A page that nobody sees holds no connection: a browser has six of them for all of its pages of one server.

import { ask } from "./api.js";

const SILENT_MS = 40_000; // the server sends a heartbeat far more often
const PAUSES_MS = [500, 1000, 2000, 4000, 8000];

/** Until the page is seen. */
function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** Calls `onEvent(name, data)` for every event, and `onState("live" | "lost", why)`, until it is closed. */
export class Stream {
  #closed = new AbortController();
  #tries = 0;

  constructor(url, onEvent, onState) {
    this.url = url;
    this.onEvent = onEvent;
    this.onState = onState;
    this.#run();
  }

  close() {
    this.#closed.abort();
  }

  async #run() {
    for (;;) {
      await seen();
      if (this.#closed.signal.aborted) return;
      try {
        await this.#read();
        if (this.#closed.signal.aborted || document.hidden) continue;
        this.onState("lost", "the server ended it");
      } catch (error) {
        if (this.#closed.signal.aborted) return;
        if (document.hidden) continue;
        if (error.code === 404 && this.#tries === 0) return this.onState("missing", error.message);
        this.onState("lost", error.message);
      }
      const pause = PAUSES_MS[Math.min(this.#tries, PAUSES_MS.length - 1)];
      this.#tries += 1;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async #read() {
    const connection = new AbortController();
    const end = () => connection.abort();
    const hide = () => document.hidden && end();
    this.#closed.signal.addEventListener("abort", end);
    document.addEventListener("visibilitychange", hide);
    window.addEventListener("pagehide", end);
    let silence = setTimeout(end, SILENT_MS);
    try {
      const answer = await ask(this.url, { signal: connection.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(silence);
        silence = setTimeout(end, SILENT_MS);
        this.#tries = 1; // it is there: another failure is the connection's
        const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#take(block);
      }
    } catch (error) {
      if (error.name === "AbortError" && !this.#closed.signal.aborted) throw new Error("nothing came for 40 s");
      throw error;
    } finally {
      clearTimeout(silence);
      this.#closed.signal.removeEventListener("abort", end);
      document.removeEventListener("visibilitychange", hide);
      window.removeEventListener("pagehide", end);
      connection.abort();
    }
  }

  #take(block) {
    this.onState("live", null);
    let name = "message";
    const data = [];
    for (const line of block.split("\n")) {
      if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
    if (data.length) this.onEvent(name, JSON.parse(data.join("\n")));
  }
}
