//! Ctrl-C and its like: noted, so that a command can tidy up before it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

static STOPPED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    STOPPED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP are noted instead of ending us.
pub fn catch() {
    let handler: extern "C" fn(libc::c_int) = note;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which a signal handler may do.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// An error once a signal asked the process to end.
pub fn check() -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Sleeps, unless a signal asks the process to end.
pub fn pause(time: Duration) -> Result<()> {
    wait_for("a pause", time + Duration::from_secs(1), {
        let start = Instant::now();
        move || Ok((start.elapsed() >= time).then_some(()))
    })
}

/// Asks again and again, for at most `limit`, until there is an answer.
pub fn wait_for<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        check()?;
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if start.elapsed() > limit {
            bail!("waited {} s for {what}", limit.as_secs());
        }
        sleep(Duration::from_millis(30));
    }
}
