// The page without its server: a service worker that holds the pages and the files of the version that was opened last.
// It never sees what is said: requests to the API pass by.

const SHELL = 'ingot.shell';
const PAGES = ['', 'live'];
const VERSION = /static\/([0-9a-f]{16})\//;
const scope = new URL(registration.scope);

addEventListener('install', () => skipWaiting());
addEventListener('activate', (event) => event.waitUntil(clients.claim()));

addEventListener('fetch', (event) => {
  const { request } = event;
  const url = new URL(request.url);
  if (request.method !== 'GET' || url.origin !== scope.origin) return;
  const path = url.pathname.slice(scope.pathname.length);
  if (PAGES.includes(path)) event.respondWith(page(request, url.origin + url.pathname));
  else if (VERSION.test(path)) event.respondWith(file(request));
});

// The newest there is.
async function page(request, address) {
  const shell = await caches.open(SHELL);
  try {
    const response = await fetch(request);
    if (response.ok) {
      const text = await response.clone().text();
      await shell.put(address, response.clone());
      await dropOthers(shell, VERSION.exec(text)?.[1]);
    }
    return response;
  } catch (error) {
    const held = await shell.match(address);
    if (held) return held;
    throw error;
  }
}

// A file of a version never changes.
async function file(request) {
  const shell = await caches.open(SHELL);
  const held = await shell.match(request.url);
  if (held) return held;
  const response = await fetch(request);
  if (response.ok) await shell.put(request.url, response.clone());
  return response;
}

async function dropOthers(shell, version) {
  const kept = await shell.keys();
  const old = kept.filter(({ url }) => VERSION.test(url) && VERSION.exec(url)[1] !== version);
  await Promise.all(old.map((request) => shell.delete(request)));
}
