// A worker for a site that is opened from its folder, where browsers start none: the script runs in
// a hidden frame and answers with messages, as a worker does. The search of the theme needs it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      // inside, messages go to the page, and scripts are loaded one after the other
      inner.postMessage = (data) => this.deliver(data);
      inner.importScripts = (...urls) =>
        urls.reduce(
          (before, one) => before.then(() => this.load(one)),
          Promise.resolve(),
        );
      this.started = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.frame.contentDocument.body.appendChild(script);
      });
    }

    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data });
      this.started.then(() => this.frame.contentWindow.dispatchEvent(event));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
