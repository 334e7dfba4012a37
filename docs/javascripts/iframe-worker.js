/* Search runs in a Worker, which browsers refuse to pages that are read from disk. There, a hidden frame takes its
   place. The plugin `offline` looks for a script of this name. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const arrive = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }))
      inside.postMessage = data => setTimeout(() => arrive(this, data))
      this.ready = new Promise(resolve => {
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = resolve
        inside.document.body.append(script)
      })
      this.postMessage = data => this.ready.then(() => arrive(inside, data))
      this.terminate = () => frame.remove()
    }
  }
}
