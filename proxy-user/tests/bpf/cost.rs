//! What the verifier has to do to let a program in.

use std::path::Path;

use libtest_mimic::Trial;

use crate::rig::{Hook, Rig};

/// Instructions that the verifier may walk through; the kernel's own limit is a million.
const LIMIT: u32 = 350_000;

pub fn trial(bpffs: &Path) -> Trial {
    let bpffs = bpffs.to_owned();
    Trial::test("the verifier is done soon", move || {
        let rig = Rig::new(&bpffs, 64);
        for hook in [Hook::Ingress, Hook::Egress] {
            let info = rig.program(hook.program()).info().unwrap();
            let verified = info.verified_instruction_count().expect("Linux 5.16 tells");
            println!("{}: {verified} instructions verified, at most {LIMIT}", hook.program());
            assert!(verified <= LIMIT, "{}: {verified}", hook.program());
        }
        Ok(())
    })
}
