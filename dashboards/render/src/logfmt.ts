// Jaeger's tags as a dashboard writes them (`a=b c="d e"`) into the JSON that its API takes. Pure.

const PAIR = /\s*([^\s=]+)=(?:"((?:[^"\\]|\\.)*)"|(\S*))/y;

/** Throws for a text that is not of that form. */
export function tagsOf(text: string): Record<string, string> {
  const tags: Record<string, string> = {};
  PAIR.lastIndex = 0;
  while (PAIR.lastIndex < text.trimEnd().length) {
    const at = PAIR.lastIndex;
    const match = PAIR.exec(text);
    if (match === null) {
      throw new Error(`tags are not key=value pairs from character ${at + 1} on: ${text}`);
    }
    tags[match[1]] = match[2] === undefined ? match[3] : match[2].replace(/\\(.)/g, '$1');
  }
  return tags;
}
