//! Devices that are added while the agent runs.

use anyhow::{Result, ensure};

use super::{Case, EMPTY, WEB, vip};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::manifest::Family;
use crate::peer::{Attempt, SocketKind};

pub const CASES: &[Case] = &[Case {
    name: "attach::a_new_device_is_served",
    wish: Wish { pods: 1, services: &[WEB, EMPTY], flags: SMALL },
    run: new_device,
}];

fn new_device(fixture: &Fixture) -> Result<()> {
    let (_space, late) = fixture.add_client()?;
    for family in Family::BOTH {
        for kind in [SocketKind::Tcp, SocketKind::Udp] {
            let to = vip(family, WEB, kind);
            let seen = eventually(SOON, || late.reach(Attempt::new(kind, to)))?;
            ensure!(seen.server.starts_with("0/"), "{seen:?}");
            late.fails(Attempt::new(kind, vip(family, EMPTY, kind)), libc::ECONNREFUSED)?;
        }
    }
    Ok(())
}
