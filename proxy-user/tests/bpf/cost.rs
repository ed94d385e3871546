//! The number of instructions that the verifier processes to accept each program.

use std::path::Path;

use aya::programs::{Program, ProgramError};
use libtest_mimic::Trial;

use proxy_testbed::harness::Harness;

/// Maximum number of instructions that the verifier may process; the kernel's own limit is a million.
const LIMIT: u32 = 100_000;

pub fn trial(bpffs: &Path) -> Trial {
    let bpffs = bpffs.to_owned();
    Trial::test("the verifier is done soon", move || {
        let mut harness = Harness::new(&bpffs, 64);
        for (name, program) in harness.ebpf.programs_mut() {
            // The iterators are small, and need the kernel's types.
            if matches!(program, Program::Iter(_)) {
                continue;
            }
            match load(program) {
                Ok(()) | Err(ProgramError::AlreadyLoaded) => {}
                Err(error) => panic!("{name}: {error}"),
            }
            let verified = program.info().unwrap().verified_instruction_count().expect("Linux 5.16 tells");
            println!("{name}: {verified} instructions verified, at most {LIMIT}");
            assert!(verified <= LIMIT, "{name}: {verified}");
        }
        Ok(())
    })
}

/// Loads a program that the harness does not need: one of a socket.
fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SockOps(program) => program.load(),
        _ => Ok(()),
    }
}
