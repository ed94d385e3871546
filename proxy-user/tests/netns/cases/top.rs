//! `ballast top` on a real node: one frame as text, and a session in a terminal (tmux).

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{Case, EMPTY, WEB, vip};
use crate::agent::{binary, command};
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB, EMPTY], flags: crate::fixture::SMALL };

pub const CASES: &[Case] = &[
    Case { name: "top::one_frame_counts_what_happened_meanwhile", wish: WISH, run: once },
    Case { name: "top::a_session_in_a_terminal", wish: WISH, run: session },
];

/// Makes a few connections to a Service that serves, and some that a Service without endpoints refuses.
fn traffic(fixture: &Fixture) -> Result<()> {
    for _ in 0..5 {
        fixture.client.reach(Attempt::new(SocketKind::Tcp, vip(Family::V4, WEB, SocketKind::Tcp)))?;
        let empty = Attempt::new(SocketKind::Tcp, vip(Family::V4, EMPTY, SocketKind::Tcp));
        fixture.client.fails(empty, libc::ECONNREFUSED)?;
    }
    Ok(())
}

fn once(fixture: &Fixture) -> Result<()> {
    let frame = |arguments: &[&str]| -> Result<String> {
        let mut top = fixture.node.command(binary());
        top.args(["top", "--once", "--interval", "1s"]).args(arguments).arg("--bpffs").arg(fixture.bpffs());
        let mut top = top.stdout(Stdio::piped()).spawn().context("cannot run ballast")?;
        while top.try_wait()?.is_none() {
            traffic(fixture)?;
        }
        let output = top.wait_with_output()?;
        ensure!(output.status.success(), "{}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    };
    eventually(SOON, || {
        let text = frame(&[])?;
        // The busiest row of the Service port comes first.
        let line = text.lines().find(|line| line.starts_with("default/web:tcp")).context("no line of web")?;
        let words: Vec<_> = line.split_whitespace().collect();
        ensure!(words.get(2).is_some_and(|rate| *rate != "0"), "no connections a second: {text}");
        ensure!(words.get(6).is_some_and(|endpoints| *endpoints == "1/1"), "{text}");
        Ok(())
    })?;
    eventually(SOON, || {
        let text = frame(&["--screen", "drops", "--filter", "no_endpoint"])?;
        ensure!(text.contains("no_endpoint") && text.contains("reject"), "{text}");
        let orig_dst = vip(Family::V4, EMPTY, SocketKind::Tcp).to_string();
        ensure!(text.lines().any(|line| line.contains(&orig_dst)), "no example: {text}");
        Ok(())
    })?;
    // A pipe is not a terminal, and the error names `--once`.
    let output = command(&fixture.node, &["top"], &fixture.bpffs())?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && error.contains("--once"), "{error}");
    // Without an agent, the command still reads the maps.
    fixture.kill()?;
    let text = frame(&[])?;
    ensure!(text.contains("agent: no answer") && text.contains("default/web"), "{text}");
    fixture.begin()
}

/// A terminal of 80 columns and 24 lines; dropping it ends the terminal.
struct Screen {
    socket: String,
}

impl Screen {
    fn start(fixture: &Fixture) -> Result<Self> {
        let screen = Self { socket: fixture.bpffs().with_file_name("tmux").display().to_string() };
        let mut tmux = fixture.node.command("tmux");
        tmux.args(["-S", &screen.socket, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24"]);
        tmux.env_remove("TMUX").env("LC_ALL", "C.UTF-8").arg(binary());
        tmux.args(["top", "--interval", "1s", "--bpffs"]).arg(fixture.bpffs());
        let status = tmux.status().context("cannot run tmux: `cargo xtask setup` installs it")?;
        ensure!(status.success(), "tmux: {status}");
        Ok(screen)
    }

    fn tmux(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("tmux").arg("-S").arg(&self.socket).args(arguments).output()?;
        ensure!(output.status.success(), "tmux: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn press(&self, key: &str) -> Result<()> {
        self.tmux(&["send-keys", key]).map(drop)
    }

    /// Waits until the screen contains all of `words`.
    fn ensure_sees_orig_dst(&self, words: &[&str]) -> Result<()> {
        eventually(SOON, || {
            let text = self.tmux(&["capture-pane", "-p"])?;
            ensure!(words.iter().all(|word| text.contains(word)), "not all of {words:?}:\n{text}");
            Ok(())
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The server may have ended together with its only program.
        let _ = self.tmux(&["kill-server"]);
    }
}

fn session(fixture: &Fixture) -> Result<()> {
    let screen = Screen::start(fixture)?;
    screen.ensure_sees_orig_dst(&[
        "agent: ok",
        "default/web",
        "default/empty",
        "CONN/S",
        "q quit",
        "by conn/s",
    ])?;
    for by in ["by pkt/s", "by bytes/s", "by fail/s", "by name", "by conn/s"] {
        screen.press("s")?;
        screen.ensure_sees_orig_dst(&[by])?;
    }
    // Events during the pause are shown when the pause is over.
    screen.press("Space")?;
    screen.ensure_sees_orig_dst(&["PAUSED"])?;
    screen.press("2")?;
    traffic(fixture)?;
    std::thread::sleep(Duration::from_secs(3));
    let text = screen.tmux(&["capture-pane", "-p"])?;
    ensure!(text.contains("PAUSED") && !text.contains("no_endpoint"), "{text}");
    screen.press("Space")?;
    screen.ensure_sees_orig_dst(&["no_endpoint"])?;
    screen.press("1")?;
    screen.press("/")?;
    screen.press("web:tcp")?;
    screen.press("Enter")?;
    screen.press("Enter")?;
    let pod = super::pod(Family::V4, 0, SocketKind::Tcp).to_string();
    screen.ensure_sees_orig_dst(&["ENDPOINT", &pod, "esc back to Services"])?;
    screen.press("2")?;
    screen.press("Escape")?;
    traffic(fixture)?;
    screen.ensure_sees_orig_dst(&["no_endpoint", "reject"])?;
    screen.press("?")?;
    screen.ensure_sees_orig_dst(&["Press any key to close this help."])?;
    screen.press("q")?;
    fixture.kill()?;
    screen.ensure_sees_orig_dst(&["agent: no answer"])?;
    screen.press("q")?;
    eventually(SOON, || {
        ensure!(screen.tmux(&["list-sessions"]).is_err(), "it still runs");
        Ok(())
    })?;
    fixture.begin()
}
