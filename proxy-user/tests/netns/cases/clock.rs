//! The machine's clock jumps. Only an emulated machine has a clock that a test may set; the variable [`OWN_CLOCK`]
//! marks such a machine.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, clock_gettime, clock_settime};

use super::{Case, WEB, restart, tcp};
use crate::agent;
use crate::fixture::{Fixture, SOON, eventually};
use proxy_testbed::manifest::Service;

/// Environment variable of machines whose clock a test may set.
const OWN_CLOCK: &str = "BALLAST_OWN_CLOCK";

const CASES: &[Case] =
    &[Case { name: "clock::jumps_of_the_clock_break_no_connection", wish: restart::WISH, run: jumps }];

/// The first port of `web` at another pod.
const MOVED: Service = Service { ports: &[tcp(80, 8080, &[1])], ..WEB };

const DAY: i64 = 86_400;

/// Returns the cases if the clock may be set, otherwise none.
pub fn cases() -> &'static [Case] {
    if std::env::var_os(OWN_CLOCK).is_some() { CASES } else { &[] }
}

fn jump(seconds: i64) -> Result<()> {
    let mut now = clock_gettime(ClockId::Realtime);
    now.tv_sec += seconds;
    clock_settime(ClockId::Realtime, now).context("cannot set the clock")
}

/// Checks that no connection is affected, changes are programmed, and the agent stays healthy.
fn jumps(fixture: &Fixture) -> Result<()> {
    restart::under(fixture, &restart::loads(restart::CALM), || {
        for (seconds, web, server) in
            [(DAY, MOVED, "1/8080"), (-3 * DAY, WEB, "0/8080"), (2 * DAY, MOVED, "1/8080")]
        {
            jump(seconds)?;
            // Let traffic flow between two jumps.
            sleep(Duration::from_secs(1));
            fixture.change(web, &[server]).with_context(|| format!("after a jump of {seconds} s"))?;
            for path in ["/healthz", "/livez", "/readyz"] {
                eventually(SOON, || {
                    let (status, said) = agent::get(&fixture.node, 10_256, path)?;
                    ensure!(status == 200, "{path} after a jump of {seconds} s: {status} {said}");
                    Ok(())
                })?;
            }
        }
        Ok(())
    })
}
