//! Records Ctrl-C and similar signals, so that a command can clean up before it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

static STOPPED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    STOPPED.store(true, Ordering::Relaxed);
}

/// Installs the handlers: from now on, SIGINT, SIGTERM and SIGHUP are recorded and do not end this process.
pub fn catch() {
    let handler: extern "C" fn(libc::c_int) = note;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which a signal handler may do.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Returns an error if a signal has asked the process to end.
pub fn check() -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Runs work that restores an earlier state, also if a signal has asked the process to end; a second signal interrupts it.
pub fn clean_up<T>(work: impl FnOnce() -> T) -> T {
    let stopped = STOPPED.swap(false, Ordering::Relaxed);
    let done = work();
    STOPPED.fetch_or(stopped, Ordering::Relaxed);
    done
}

/// Sleeps for `time`; returns an error as soon as a signal asks the process to end.
pub fn pause(time: Duration) -> Result<()> {
    wait_for("a pause", time + Duration::from_secs(1), {
        let start = Instant::now();
        move || Ok((start.elapsed() >= time).then_some(()))
    })
}

/// Calls `ask` repeatedly until it returns an answer; an error after `limit`, or if a signal asks the process to end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_up_waits_after_a_signal_and_the_signal_stays() {
        STOPPED.store(true, Ordering::Relaxed);
        let interrupted = pause(Duration::ZERO);
        let cleaned = clean_up(|| pause(Duration::ZERO));
        let stopped = STOPPED.swap(false, Ordering::Relaxed);
        assert!(interrupted.is_err() && cleaned.is_ok() && stopped);
    }
}
