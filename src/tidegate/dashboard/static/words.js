// Numbers, times and places as people read them.

let ahead = 0; // how far the server's clock is ahead of this one, in ms

/** What time it is there. */
export const now = () => Date.now() + ahead;

export function noteClock(date) {
  const at = Date.parse(date ?? "");
  if (!Number.isNaN(at) && Math.abs(at - now()) > 2000) ahead = at - Date.now();
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";
const isNone = (value) => value === null || value === undefined;

export const count = (value) => (isNone(value) ? NONE : whole.format(Math.round(value)));
export const shortCount = (value) => (isNone(value) ? NONE : value < 10000 ? whole.format(Math.round(value)) : short.format(value));
export const rate = (value) => (isNone(value) ? NONE : `${shortCount(value)}/s`);
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function duration(ms) {
  if (isNone(ms)) return NONE;
  const size = Math.abs(ms);
  const sign = ms < 0 ? "−" : "";
  if (size < 1000) return `${sign}${Math.round(size)} ms`;
  const seconds = size / 1000;
  if (seconds < 10) return `${sign}${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${sign}${Math.round(seconds)} s`;
  if (seconds < 7200) return `${sign}${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${sign}${Math.round(seconds / 3600)} h`;
  if (seconds < 63072000) return `${sign}${whole.format(Math.round(seconds / 86400))} d`;
  return `${sign}${Math.round(seconds / 31536000)} years`;
}

export function bytes(value) {
  if (isNone(value)) return NONE;
  const sign = value < 0 ? "−" : "";
  let size = Math.abs(value);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${sign}${unit === "B" || size >= 100 ? Math.round(size) : size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${sign}${size.toFixed(1)} TB`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const year = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

export const asMs = (moment) => (isNone(moment) ? null : typeof moment === "number" ? moment : Date.parse(moment));
const sameDay = (a, b) => new Date(a).toDateString() === new Date(b).toDateString();

/** A moment by the reader's own clock; the day only where it is not today's. */
export function time(moment, { withSeconds = true } = {}) {
  const at = asMs(moment);
  if (at === null || Number.isNaN(at)) return NONE;
  const hours = (withSeconds ? clock : minutes).format(at);
  if (sameDay(at, now())) return hours;
  return `${(new Date(at).getFullYear() === new Date(now()).getFullYear() ? day : year).format(at)} ${hours}`;
}

const MOMENT = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)/g;

/** A sentence of the server's, with its moments by the reader's clock. */
export const withTimes = (text) => text.replaceAll(MOMENT, (moment) => time(moment));

export const exact = (moment) => {
  const at = asMs(moment);
  return at === null || Number.isNaN(at) ? "" : `${new Date(at).toISOString()}`;
};

export function ago(moment) {
  const at = asMs(moment);
  if (at === null || Number.isNaN(at)) return NONE;
  const since = now() - at;
  return since < 1000 ? "just now" : `${duration(since < 10000 ? Math.floor(since / 1000) * 1000 : since).replace(".0", "")} ago`;
}

/** How far event time is behind. */
export function behind(ms) {
  if (isNone(ms)) return NONE;
  const late = now() - ms;
  return late < 0 ? `${duration(-late)} ahead` : `${duration(late).replace(".0", "")} behind`;
}

/** A value by the unit that its name ends with. */
export function measured(name, value) {
  if (name.endsWith("_ms")) return duration(value);
  if (name.endsWith("bytes")) return bytes(value);
  return count(value);
}

const NAMES = {
  duration_ms: "Duration",
  alignment_ms: "Alignment",
  snapshot_ms: "Storing",
  commit_ms: "Commit",
  shown_ms: "Until shown",
  prepared_ms: "Until prepared",
  barrier_ms: "First barrier",
  new_bytes: "New bytes",
  total_bytes: "All bytes",
  in_flight_bytes: "In flight",
  batches: "Batches",
  files: "Files",
};
export const named = (measure) => NAMES[measure] ?? capital(measure.replace(/_(ms|bytes)$/, "").replaceAll("_", " "));
/** A sentence that begins with a word. What begins with a name, as of a checkpoint, is left as it is. */
export const capital = (text) => (/^[a-z]+(?=[\s,:.]|$)/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);
export const spaced = (text) => text.replaceAll("_", " ");

export function shorten(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}
