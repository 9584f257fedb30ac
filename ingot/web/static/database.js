// Conversations and their files in IndexedDB. Where the browser offers none, they live as long as the page.

const NAME = 'ingot';
const STORES = ['conversations', 'files'];

export async function openDatabase() {
  try {
    return new Database(await opened());
  } catch {
    return new Database(null);
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const store of STORES) request.result.createObjectStore(store, { keyPath: 'id' });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

class Database {
  constructor(connection) {
    this.connection = connection;
    if (connection) connection.onversionchange = () => connection.close(); // another tab deletes it
  }

  get isLasting() {
    return this.connection !== null;
  }

  all(store) {
    return this.#read(store, (records) => records.getAll(), []);
  }

  keys(store) {
    return this.#read(store, (records) => records.getAllKeys(), []);
  }

  get(store, id) {
    return this.#read(store, (records) => records.get(id), undefined);
  }

  // Rejects where there is no room.
  put(store, record) {
    return this.#write(store, (records) => records.put(record));
  }

  remove(store, id) {
    return this.#write(store, (records) => records.delete(id));
  }

  #read(store, ask, missing) {
    if (!this.connection) return Promise.resolve(missing);
    const request = ask(this.connection.transaction(store).objectStore(store));
    return new Promise((resolve, reject) => {
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  }

  #write(store, change) {
    if (!this.connection) return Promise.reject(new Error('This browser stores nothing.'));
    const transaction = this.connection.transaction(store, 'readwrite');
    change(transaction.objectStore(store));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  }
}
