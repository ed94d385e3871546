//! Devices that come while the agent runs.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Case, EMPTY, WEB, vip};
use crate::lab::{Lab, SMALL, Wish, eventually};
use crate::manifest::Family;
use crate::peer::{Attempt, Kind};

/// How soon a pod that has just been made can reach Services: some 100 ms, more on a busy machine, and well before
/// the agent looks through all devices again.
const AT_ONCE: Duration = Duration::from_secs(5);

pub const CASES: &[Case] = &[Case {
    name: "attach::a_new_device_is_served_at_once",
    wish: Wish { pods: 1, services: &[WEB, EMPTY], flags: SMALL },
    run: new_device,
}];

fn new_device(lab: &Lab) -> Result<()> {
    let (_space, late) = lab.add_client()?;
    for family in Family::BOTH {
        for kind in [Kind::Tcp, Kind::Udp] {
            let to = vip(family, WEB, kind);
            let seen = eventually(AT_ONCE, || late.reach(Attempt::new(kind, to)))?;
            ensure!(seen.server.starts_with("0/"), "{seen:?}");
            late.fails(Attempt::new(kind, vip(family, EMPTY, kind)), libc::ECONNREFUSED)?;
        }
    }
    Ok(())
}
