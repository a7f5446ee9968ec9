// Search in pages that are opened from a folder. Browsers start no Worker from file:, so a hidden
// frame runs the worker's script here, and hears and sends its messages as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.document.open() // Firefox would load the empty page later, over the script
      inside.document.write("<body></body>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      this.started = new Promise(resolve => (script.onload = resolve))
      script.src = url
      inside.document.body.append(script)
    }
    postMessage(data) {
      const { inside } = this
      this.started.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
