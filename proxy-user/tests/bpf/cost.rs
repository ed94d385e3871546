//! The number of instructions that the verifier processes to accept each program.

use std::path::Path;

use libtest_mimic::Trial;
use proxy_common::map_names::TAIL_CALL_TARGETS;

use crate::harness::{Harness, Hook};

/// Maximum number of instructions that the verifier may process; the kernel's own limit is a million.
const LIMIT: u32 = 100_000;

pub fn trial(bpffs: &Path) -> Trial {
    let bpffs = bpffs.to_owned();
    Trial::test("the verifier is done soon", move || {
        let harness = Harness::new(&bpffs, 64);
        for name in [Hook::Ingress, Hook::Egress].map(Hook::program).into_iter().chain(TAIL_CALL_TARGETS) {
            let info = harness.program(name).info().unwrap();
            let verified = info.verified_instruction_count().expect("Linux 5.16 tells");
            println!("{name}: {verified} instructions verified, at most {LIMIT}");
            assert!(verified <= LIMIT, "{name}: {verified}");
        }
        let info = harness.early_program("xdp_ingress").info().unwrap();
        let verified = info.verified_instruction_count().expect("Linux 5.16 tells");
        println!("xdp_ingress: {verified} instructions verified, at most {LIMIT}");
        assert!(verified <= LIMIT, "xdp_ingress: {verified}");
        Ok(())
    })
}
