// Browsers start no worker from a file. For a site that is opened from a folder, a hidden frame runs the script of the
// search instead: messages to the worker become events of the frame, and what it posts become events of the worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><body></body>"
      frame.addEventListener("load", () => this.start(frame.contentWindow, String(url)), { once: true })
      document.body.append(frame)
    }

    start(inner, url) {
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = new URL(url, location.href)
      script.addEventListener("load", () => {
        this.inner = inner
        this.waiting.splice(0).forEach((data) => this.postMessage(data))
      })
      inner.document.body.append(script)
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
  }
}
