// Browsers start no Worker from file://. There, the site's search runs in a hidden frame in its place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.addEventListener("message", event => this.onmessage && this.onmessage(event));
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise(resolve => { this.loaded = resolve; });
      inside.document.open();
      inside.document.write("<!doctype html><title>search</title><body></body>");
      inside.document.close();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce(
        (before, each) => before.then(() => this.load(each)), Promise.resolve());
      this.load(url).then(this.loaded);
    }
    load(url) {
      const script = this.frame.contentDocument.createElement("script");
      script.src = url;
      const done = new Promise(resolve => { script.onload = script.onerror = resolve; });
      this.frame.contentDocument.body.appendChild(script);
      return done;
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
