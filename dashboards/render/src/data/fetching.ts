// JSON from the two data sources, through the program that serves this page.

export async function getJson(path: string, parameters: Record<string, string>, lists: Record<string, string[]> = {}): Promise<any> {
  const query = new URLSearchParams(parameters);
  for (const [name, values] of Object.entries(lists)) {
    values.forEach((value) => query.append(name, value));
  }
  const answer = await fetch(`${path}?${query}`);
  const text = await answer.text();
  let body: any;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error(`${path}: ${answer.status}, not JSON: ${text.slice(0, 200)}`);
  }
  const said = body?.error ?? body?.errors?.[0]?.msg;
  if (!answer.ok || said) {
    throw new Error(`${path}: ${answer.status} ${said ?? text.slice(0, 200)}`);
  }
  return body;
}
