// Text fields that are written in as in a chat.

// Enter sends; with Shift it is a new line, and while an input method composes it belongs to that.
export function isSend(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing;
}

// A text field as tall as its text, up to what the style sheet allows.
export function growing(field) {
  const fit = () => {
    field.style.height = 'auto';
    field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
  };
  field.addEventListener('input', fit);
  fit();
  return fit;
}
