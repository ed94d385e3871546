//! Computes the depth of the programs' stack as kernels before 6.8 do: they round each frame up to 32 bytes. The kernel of
//! the build machine may round to 16, and would then load programs that older kernels refuse.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};

/// `MAX_BPF_STACK` (include/linux/filter.h).
pub const LIMIT: u32 = 512;
/// Bytes to a multiple of which a frame is rounded up (`check_max_stack_depth` in kernel/bpf/verifier.c, up to 6.7).
const ROUND: u32 = 32;

/// Size of an instruction in bytes.
const SIZE: u8 = 8;
/// `BPF_LD | BPF_IMM | BPF_DW`, which is two instructions long.
const LOAD_IMMEDIATE: u8 = 0x18;
/// `BPF_ALU64 | BPF_MOV | BPF_X`.
const MOVE: u8 = 0xbf;
/// `BPF_ALU64 | BPF_ADD | BPF_K`.
const ADD: u8 = 0x07;
/// `BPF_JMP | BPF_CALL`: with [`PSEUDO_CALL`] a call of a function of the program, else of a function of the kernel.
const CALL: u8 = 0x85;
/// `BPF_PSEUDO_CALL`, in the source register.
const PSEUDO_CALL: u8 = 1;
/// The register of the frame pointer.
const FRAME: u8 = 10;

/// Start of a function: the index of its section, and the offset in the section.
type FunctionStart = (usize, u64);

struct Function {
    name: String,
    /// Size of the function's stack frame in bytes, not rounded.
    frame: u32,
    calls: Vec<FunctionStart>,
}

/// A chain of calls, and the bytes of stack that it needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Sum of all frames, each rounded up.
    pub bytes: u32,
    /// Names of the functions and sizes of their frames, not rounded, the program first.
    pub chain: Vec<(String, u32)>,
}

/// Returns the deepest chain of calls in the object.
pub fn deepest(file: &object::File<'_>) -> Result<Depth> {
    let functions = read(file)?;
    let mut known = BTreeMap::new();
    let all = functions.keys().map(|place| depth(*place, &functions, &mut known));
    Ok(all.max_by_key(|depth| depth.bytes).unwrap_or_default())
}

/// Returns the deepest chain of calls that starts at this function. The result need not be right for a recursive program,
/// which the verifier refuses before anything else.
fn depth(
    place: FunctionStart,
    functions: &BTreeMap<FunctionStart, Function>,
    known: &mut BTreeMap<FunctionStart, Depth>,
) -> Depth {
    if let Some(depth) = known.get(&place) {
        return depth.clone();
    }
    let Some(function) = functions.get(&place) else { return Depth::default() };
    // A placeholder for the function while its callees are examined.
    known.insert(place, Depth::default());
    let below = function.calls.iter().map(|callee| depth(*callee, functions, known));
    let below = below.max_by_key(|depth| depth.bytes).unwrap_or_default();
    let mut chain = vec![(function.name.clone(), function.frame)];
    chain.extend(below.chain);
    let depth = Depth { bytes: below.bytes + function.frame.max(1).next_multiple_of(ROUND), chain };
    known.insert(place, depth.clone());
    depth
}

fn read(file: &object::File<'_>) -> Result<BTreeMap<FunctionStart, Function>> {
    let mut functions = BTreeMap::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0) {
        let Some(index) = symbol.section_index() else { continue };
        let section = file.section_by_index(index)?;
        let name = symbol.name().unwrap_or("?").to_owned();
        let code = section
            .data_range(symbol.address(), symbol.size())?
            .with_context(|| format!("`{name}` is not inside its section"))?;
        let mut function =
            Function { name, frame: frame(code), calls: calls(code, index.0, symbol.address()) };
        let end = symbol.address() + symbol.size();
        for (at, relocation) in section.relocations() {
            if at < symbol.address() || at >= end {
                continue;
            }
            let RelocationTarget::Symbol(target) = relocation.target() else { continue };
            let target = file.symbol_by_index(target)?;
            let Some(instruction) = code.get((at - symbol.address()) as usize..).and_then(Instruction::read)
            else {
                continue;
            };
            if let (true, Some(section)) = (instruction.is_call(), target.section_index()) {
                // If the relocation refers to the symbol of the section, the instruction contains the offset of the callee.
                let inside =
                    u64::try_from(i64::from(instruction.immediate) + 1).unwrap_or(0) * u64::from(SIZE);
                let of_section = target.kind() == SymbolKind::Section;
                function.calls.push((section.0, if of_section { inside } else { target.address() }));
            }
        }
        functions.insert((index.0, symbol.address()), function);
    }
    Ok(functions)
}

struct Instruction {
    code: u8,
    target: u8,
    source: u8,
    offset: i32,
    immediate: i32,
}

impl Instruction {
    fn read(bytes: &[u8]) -> Option<Self> {
        let [code, registers, o0, o1, i0, i1, i2, i3, ..] = *bytes else { return None };
        Some(Self {
            code,
            target: registers & 0xf,
            source: registers >> 4,
            offset: i32::from(i16::from_le_bytes([o0, o1])),
            immediate: i32::from_le_bytes([i0, i1, i2, i3]),
        })
    }

    fn is_call(&self) -> bool {
        self.code == CALL && self.source == PSEUDO_CALL
    }

    /// Returns the register that holds the address, if the instruction reads or writes memory.
    fn base(&self) -> Option<u8> {
        match self.code & 0x07 {
            1 => Some(self.source),
            2 | 3 => Some(self.target),
            _ => None,
        }
    }
}

fn instructions(code: &[u8]) -> impl Iterator<Item = (u64, Instruction)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let instruction = Instruction::read(code.get(at..)?)?;
        let here = at as u64;
        at += if instruction.code == LOAD_IMMEDIATE { 2 * usize::from(SIZE) } else { usize::from(SIZE) };
        Some((here, instruction))
    })
}

/// Returns the size of a function's frame in bytes: how far below the frame pointer it reads, writes or computes addresses.
fn frame(code: &[u8]) -> u32 {
    let mut lowest = 0;
    let mut addresses = BTreeMap::from([(FRAME, 0)]);
    for (_, instruction) in instructions(code) {
        if let Some(base) = instruction.base().and_then(|base| addresses.get(&base)) {
            lowest = lowest.min(base + instruction.offset);
        }
        match instruction.code {
            MOVE if let Some(from) = addresses.get(&instruction.source).copied() => {
                addresses.insert(instruction.target, from);
            }
            ADD if let Some(from) = addresses.get_mut(&instruction.target) => {
                *from += instruction.immediate;
                lowest = lowest.min(*from);
            }
            // A called function overwrites r0 to r5.
            CALL => addresses.retain(|register, _| *register > 5),
            code if matches!(code & 0x07, 0 | 1 | 4 | 7) => {
                addresses.remove(&instruction.target);
            }
            _ => {}
        }
    }
    lowest.unsigned_abs()
}

/// Returns the functions of the same section that are called without a relocation.
fn calls(code: &[u8], section: usize, start: u64) -> Vec<FunctionStart> {
    let relative = instructions(code).filter(|(_, instruction)| instruction.is_call());
    // -1 is the placeholder of a relocation.
    let relative = relative.filter(|(_, instruction)| instruction.immediate != -1);
    relative
        .filter_map(|(at, instruction)| {
            let next = start + at + u64::from(SIZE);
            let distance = i64::from(instruction.immediate) * i64::from(SIZE);
            Some((section, next.checked_add_signed(distance)?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(code: u8, target: u8, source: u8, offset: i16, immediate: i32) -> Vec<u8> {
        let mut bytes = vec![code, target | source << 4];
        bytes.extend(offset.to_le_bytes());
        bytes.extend(immediate.to_le_bytes());
        bytes
    }

    #[test]
    fn a_frame_is_as_deep_as_what_it_touches() {
        // *(u32 *)(r10 - 24) = r1
        let store = instruction(0x63, FRAME, 1, -24, 0);
        assert_eq!(frame(&store), 24);
        // r2 = r10; r2 += -40
        let address = [instruction(MOVE, 2, FRAME, 0, 0), instruction(ADD, 2, 0, 0, -40)].concat();
        assert_eq!(frame(&address), 40);
        assert_eq!(frame(&[store, address].concat()), 40);
        // r3 = r1; r3 += -99
        assert_eq!(frame(&[instruction(MOVE, 3, 1, 0, 0), instruction(ADD, 3, 0, 0, -99)].concat()), 0);
        // r2 = r10; call; r2 += -99
        let called = [instruction(MOVE, 2, FRAME, 0, 0), instruction(CALL, 0, 0, 0, 7)].concat();
        assert_eq!(frame(&[called, instruction(ADD, 2, 0, 0, -99)].concat()), 0);
        // r2 = r10; r2 = r1; r2 += -99
        let lost = [(2, FRAME), (2, 1)].map(|(to, from)| instruction(MOVE, to, from, 0, 0)).concat();
        assert_eq!(frame(&[lost, instruction(ADD, 2, 0, 0, -99)].concat()), 0);
    }

    #[test]
    fn a_chain_adds_up_rounded_frames() {
        let place = |at| (1, at);
        let function = |name: &str, frame, calls: &[u64]| Function {
            name: name.to_owned(),
            frame,
            calls: calls.iter().map(|at| place(*at)).collect(),
        };
        let functions = BTreeMap::from([
            (place(0), function("program", 0, &[8, 16])),
            (place(8), function("shallow", 33, &[])),
            (place(16), function("deep", 200, &[8, 16])),
        ]);
        let found = depth(place(0), &functions, &mut BTreeMap::new());
        assert_eq!(found.bytes, 32 + 224 + 64);
        let names: Vec<_> = found.chain.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["program", "deep", "shallow"]);
    }

    #[test]
    fn a_call_without_relocation_is_found() {
        let code =
            [instruction(CALL, 0, PSEUDO_CALL, 0, 2), instruction(CALL, 0, PSEUDO_CALL, 0, -1)].concat();
        assert_eq!(calls(&code, 3, 16), [(3, 16 + 8 + 16)]);
    }
}
