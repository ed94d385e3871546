//! Headless Chromium in a namespace, driven by the `DevTools` protocol over a websocket.

use std::cell::RefCell;
use std::fs;
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::fixture::eventually;
use proxy_testbed::space::Space;

/// Timeout of the start, and of an answer: a busy machine may not run a process for many seconds.
const PATIENCE: Duration = Duration::from_mins(1);

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-extensions", "--hide-scrollbars", "--remote-debugging-port=0", "about:blank",
];

/// A browser with one page. Dropping it ends the browser.
pub struct Browser {
    runtime: Runtime,
    link: RefCell<Link>,
    _process: Process,
}

struct Process(Child);

struct Link {
    socket: WebSocketStream<tokio::net::TcpStream>,
    session: String,
    last: u64,
    /// What the page has reported: exceptions, errors in the console, and resources that could not be loaded.
    complaints: Vec<String>,
}

impl Browser {
    /// Starts a browser in `space`, with a profile below `folder`, which is deleted with the folder.
    pub fn start(space: &Space, folder: &Path) -> Result<Self> {
        let profile = folder.join("chromium");
        let mut command = space.command("chromium");
        command.args(FLAGS).arg(format!("--user-data-dir={}", profile.display()));
        command.env("HOME", folder).env_remove("DISPLAY").env_remove("DBUS_SESSION_BUS_ADDRESS");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.process_group(0).spawn();
        let process = Process(child.context("cannot run chromium: `cargo xtask setup` installs it")?);
        let (port, path) = eventually(PATIENCE, || {
            let text = fs::read_to_string(profile.join("DevToolsActivePort"))?;
            let (port, path) = text.split_once('\n').context("half a file")?;
            Ok((port.parse::<u16>()?, path.trim().to_owned()))
        })
        .context("chromium does not start")?;
        let stream = space.inside(|| Ok(TcpStream::connect(("127.0.0.1", port))?))?;
        stream.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let socket = runtime.block_on(async {
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let url = format!("ws://127.0.0.1:{port}{path}");
            let (socket, _) = timeout(PATIENCE, tokio_tungstenite::client_async(url, stream)).await??;
            anyhow::Ok(socket)
        })?;
        let link = Link { socket, session: String::new(), last: 0, complaints: Vec::new() };
        let browser = Self { runtime, link: RefCell::new(link), _process: process };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", &attach)?;
        session["sessionId"]
            .as_str()
            .context("no session")?
            .clone_into(&mut browser.link.borrow_mut().session);
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol, and returns its result.
    pub fn call(&self, method: &str, parameters: &Value) -> Result<Value> {
        let mut link = self.link.borrow_mut();
        let answer = self.runtime.block_on(async { timeout(PATIENCE, link.call(method, parameters)).await });
        answer.with_context(|| format!("{method}: no answer within {PATIENCE:?}"))?
    }

    /// Opens an address, and waits until it is loaded.
    pub fn open(&self, url: &str) -> Result<()> {
        let answer = self.call("Page.navigate", &json!({ "url": url }))?;
        ensure!(answer["errorText"].is_null(), "{url}: {answer}");
        self.becomes("document.readyState === 'complete'")
    }

    /// Returns the value of a JavaScript expression.
    pub fn value(&self, expression: &str) -> Result<Value> {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", &parameters)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until a JavaScript expression is true.
    pub fn becomes(&self, expression: &str) -> Result<()> {
        eventually(PATIENCE, || {
            let is_true = self.value(expression)? == json!(true);
            ensure!(is_true, "not true: {expression}; the page: {}", self.value("document.body.innerText")?);
            Ok(())
        })
    }

    /// Presses a key.
    pub fn press(&self, key: &str) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            other => bail!("no code for {other}"),
        };
        let text = if key == "Enter" { json!("\r") } else { Value::Null };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_null() {
                event["text"] = text.clone();
            }
            self.call("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Types text into the element that has the focus.
    pub fn enter(&self, text: &str) -> Result<()> {
        self.call("Input.insertText", &json!({ "text": text })).map(drop)
    }

    /// Sets the size of the window, in CSS pixels.
    pub fn resize(&self, width: u32, height: u32, is_phone: bool) -> Result<()> {
        let scale = if is_phone { 2 } else { 1 };
        let metrics =
            json!({ "width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone });
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        self.call("Emulation.setTouchEmulationEnabled", &json!({ "enabled": is_phone })).map(drop)
    }

    /// Sets the colour scheme that the system prefers: `light` or `dark`.
    pub fn prefer(&self, colours: &str) -> Result<()> {
        let features = json!([{ "name": "prefers-color-scheme", "value": colours }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": features })).map(drop)
    }

    /// Writes a picture of the visible page to a file.
    pub fn picture(&self, file: &PathBuf) -> Result<()> {
        let answer =
            self.call("Page.captureScreenshot", &json!({ "format": "png", "optimizeForSpeed": false }))?;
        let data = answer["data"].as_str().context("no picture")?;
        fs::write(file, base64(data)?).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Returns what the page has reported since the last call.
    pub fn complaints(&self) -> Result<Vec<String>> {
        // All messages that came before the answer to this call are read now.
        self.value("1")?;
        Ok(std::mem::take(&mut self.link.borrow_mut().complaints))
    }
}

impl Link {
    async fn call(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.last += 1;
        let id = self.last;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.socket.send(Message::text(message.to_string())).await?;
        loop {
            let message = self.socket.next().await.context("chromium has ended")??;
            let Ok(text) = message.to_text() else { continue };
            let Ok(mut answer) = serde_json::from_str::<Value>(text) else { continue };
            self.note(&answer);
            if answer["id"] == json!(id) {
                ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return Ok(answer["result"].take());
            }
        }
    }

    fn note(&mut self, event: &Value) {
        let said = &event["params"];
        let complaint = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => Some(&said["exceptionDetails"]),
            Some("Log.entryAdded") if said["entry"]["level"] == "error" => Some(&said["entry"]),
            Some("Runtime.consoleAPICalled")
                if ["error", "warning", "assert"].contains(&said["type"].as_str().unwrap_or_default()) =>
            {
                Some(&said["args"])
            }
            _ => None,
        };
        self.complaints.extend(complaint.map(ToString::to_string));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process group contains all processes of the browser; the browser may have ended before.
        // SAFETY: a system call without pointers.
        unsafe { libc::kill(-self.0.id().cast_signed(), libc::SIGKILL) };
        let _ = self.0.wait();
    }
}

/// Decodes base64.
fn base64(text: &str) -> Result<Vec<u8>> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = LETTERS.iter().position(|known| *known == letter).context("no base64")?;
        bits = bits << 6 | value as u32;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    Ok(bytes)
}
