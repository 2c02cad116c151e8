// Questions to the server. The token is in memory, and nowhere else: it is gone when the page is.

import { noteClock } from "./words.js";

const BASE = "/api/v1";
let token = null;
let askForToken = async () => null; // set by the application: shows a dialog

export class Failure extends Error {
  constructor(text, code) {
    super(text);
    this.code = code;
  }
}

export const hasToken = () => token !== null;
export const keepToken = (given) => {
  token = given;
};
export const onTokenWanted = (ask) => {
  askForToken = ask;
};

export const address = (...parts) => [BASE, ...parts.map(encodeURIComponent)].join("/");
export const ofPipeline = (key, ...parts) => address("pipelines", key, ...parts);

function headers() {
  return token === null ? {} : { Authorization: `Bearer ${token}` };
}

let asking = null; // one dialog, however many requests were refused

/** An answer with its body unread. Where the server wants its token, it is asked for once. */
export async function ask(url, { signal, method = "GET", isPatient = true } = {}) {
  let answer;
  try {
    answer = await fetch(url, { method, signal, headers: headers(), cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the dashboard's server does not answer", 0);
  }
  noteClock(answer.headers.get("Date"));
  if (answer.status === 401 && method === "GET" && isPatient) {
    asking ??= askForToken(token === null).finally(() => {
      asking = null;
    });
    const given = await asking;
    if (given !== null) {
      token = given;
      return ask(url, { signal, method, isPatient: true });
    }
  }
  if (!answer.ok) throw new Failure(await reason(answer), answer.status);
  return answer;
}

async function reason(answer) {
  try {
    const { error } = await answer.json();
    if (typeof error === "string" && error) return error;
  } catch {
    // Not an answer of ours: the status has to do.
  }
  return `the server answered ${answer.status} ${answer.statusText}`.trim();
}

export async function get(url, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return (await ask(url + search, { signal })).json();
}

export async function post(url) {
  return (await ask(url, { method: "POST" })).json();
}
