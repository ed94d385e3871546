//! Checks and strips the BPF object before it is loaded: the kernel's own error messages say less.

pub mod stack;

use anyhow::{Context as _, Result, bail};
use object::build::elf::SectionData;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionKind};

/// Contents of a BPF object.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Names of the programs' functions, sorted.
    pub programs: Vec<String>,
    /// Number of instructions in all sections of code.
    pub instructions: u64,
    /// Calls of byte-loop functions such as `memset` in the programs: correct, but slow.
    pub slow_calls: Vec<String>,
    /// The chain of calls that needs the most stack.
    pub deepest: stack::Depth,
}

/// Checks the object; a panic path, an undefined function, too deep a stack or the lack of any program is an error.
pub fn check(elf: &[u8]) -> Result<Report> {
    let file = object::File::parse(elf).context("not an ELF file")?;
    let mut report = Report::default();
    for symbol in file.symbols() {
        let name = symbol.name().unwrap_or_default();
        if name.contains("panicking") {
            bail!(
                "the object holds `{name}`: some index, division or unwrap can panic, which no verifier accepts"
            );
        }
        if symbol.is_undefined() && symbol.is_global() {
            bail!("the object needs `{name}`, which neither the object nor the kernel provides");
        }
    }
    for section in file.sections().filter(|section| section.kind() == SectionKind::Text) {
        let name = section.name().unwrap_or_default();
        report.instructions += section.size() / 8;
        if name == ".text" {
            continue;
        }
        let functions = file.symbols().filter(|symbol| {
            symbol.section_index() == Some(section.index()) && symbol.is_global() && symbol.is_definition()
        });
        report.programs.extend(functions.filter_map(|symbol| symbol.name().ok()).map(str::to_owned));
        for (_, relocation) in section.relocations() {
            let RelocationTarget::Symbol(index) = relocation.target() else { continue };
            let callee =
                file.symbol_by_index(index).ok().and_then(|symbol| symbol.name().ok()).unwrap_or_default();
            if matches!(callee, "memset" | "memcpy" | "memmove" | "memcmp" | "bcmp") {
                report.slow_calls.push(format!("{name} calls {callee}"));
            }
        }
    }
    report.programs.sort();
    report.slow_calls.sort();
    report.slow_calls.dedup();
    if report.programs.is_empty() {
        bail!("the object holds no program");
    }
    report.deepest = stack::deepest(&file)?;
    if report.deepest.bytes > stack::LIMIT {
        let chain: Vec<_> =
            report.deepest.chain.iter().map(|(name, frame)| format!("{name} ({frame})")).collect();
        bail!(
            "{} bytes of stack are more than the {} that Linux 6.1 has: {}",
            report.deepest.bytes,
            stack::LIMIT,
            chain.join(" > ")
        );
    }
    Ok(report)
}

/// Returns the object without DWARF, which is eight tenths of its size: the linker has already generated BTF from it, and the
/// kernel and the agent read only BTF.
pub fn without_dwarf(elf: &[u8]) -> Result<Vec<u8>> {
    let mut builder = object::build::elf::Builder::read(elf).context("not an ELF file")?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete |= name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
    }
    builder.delete_orphans();
    // LLVM writes one string table for the names of symbols and sections; the crate `object` needs two to write the file.
    let is_table =
        |section: &object::build::elf::Section<'_>| matches!(section.data, SectionData::SectionString);
    if !builder.sections.iter().any(is_table) {
        let names = builder.sections.add();
        names.name = b".shstrtab".as_slice().into();
        names.sh_type = object::elf::SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut written = Vec::new();
    builder.write(&mut written).context("cannot write the object without DWARF")?;
    Ok(written)
}

/// Returns the object without the source lines of its instructions (`line_info` of `.BTF.ext`), which are three fifths of its
/// size. Only the verifier's log shows them, but each start of an agent would read them and pass them to the kernel.
pub fn without_lines(elf: &[u8]) -> Result<Vec<u8>> {
    let mut builder = object::build::elf::Builder::read(elf).context("not an ELF file")?;
    let mut end = 0;
    for section in &mut builder.sections {
        if let (b".BTF.ext", SectionData::Data(data)) = (section.name.as_slice(), &mut section.data) {
            let kept = without_line_info(data).context("the section .BTF.ext is not as expected")?;
            end = kept.len() as u64;
            *data = kept.into();
        }
    }
    for section in &mut builder.sections {
        if let (b".rel.BTF.ext", SectionData::Relocation(all)) = (section.name.as_slice(), &mut section.data)
        {
            all.retain(|relocation| relocation.r_offset < end);
        }
    }
    let mut written = Vec::new();
    builder.write(&mut written).context("cannot write the object without its lines")?;
    Ok(written)
}

/// Returns `.BTF.ext` (`struct btf_ext_header`, Documentation/bpf/btf.rst) without `line_info`; `None` unless `line_info` is
/// the last part of the section.
fn without_line_info(data: &[u8]) -> Option<Vec<u8>> {
    let word = |at| Some(u32::from_le_bytes(*data.get(at..)?.first_chunk()?));
    let (header, lines, others_length) = (word(4)?, word(16)?, word(28)?);
    let end = header.checked_add(lines)?;
    if others_length != 0 || end.checked_add(word(20)?)? as usize != data.len() {
        return None;
    }
    let mut kept = data.get(..end as usize)?.to_vec();
    // The offset of an empty part must also be within the section.
    let ends = [0, lines, 0].map(u32::to_le_bytes).concat();
    kept.get_mut(20..32)?.copy_from_slice(&ends);
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_no_program_is_refused() {
        // The test's own executable is an ELF file whose code is in `.text` and similar sections.
        let own = fs_err::read(std::env::current_exe().unwrap()).unwrap();
        assert!(check(&own).is_err());
    }

    #[test]
    fn lines_go_and_functions_stay() {
        let section = |parts: [u32; 4], bytes: &[u8]| {
            let words = [0x0001_eb9f, 32, 0, 8].into_iter().chain(parts);
            words.flat_map(u32::to_le_bytes).chain(bytes.iter().copied()).collect::<Vec<_>>()
        };
        let whole = section([8, 12, 20, 0], b"functionlines lines!");
        assert_eq!(without_line_info(&whole), Some(section([8, 0, 8, 0], b"function")));
        assert_eq!(without_line_info(&section([8, 12, 20, 4], b"functionlines lines!more")), None);
        assert_eq!(without_line_info(&whole[..40]), None);
        assert_eq!(without_line_info(&[]), None);
    }

    #[test]
    fn dwarf_goes_and_the_rest_stays() {
        let own = fs_err::read(std::env::current_exe().unwrap()).unwrap();
        let mut written = object::write::Object::new(
            object::BinaryFormat::Elf,
            object::Architecture::Bpf,
            object::Endianness::Little,
        );
        for (name, kind) in [
            ("classifier", SectionKind::Text),
            (".BTF", SectionKind::Metadata),
            (".debug_info", SectionKind::Debug),
        ] {
            let id = written.add_section(Vec::new(), name.into(), kind);
            written.append_section_data(id, name.as_bytes(), 1);
        }
        let stripped = without_dwarf(&written.write().unwrap()).unwrap();
        let file = object::File::parse(&*stripped).unwrap();
        let data = |name: &str| file.section_by_name(name).map(|section| section.data().unwrap().to_vec());
        assert_eq!(data("classifier"), Some(b"classifier".to_vec()));
        assert_eq!((data(".BTF"), data(".debug_info")), (Some(b".BTF".to_vec()), None));
        assert!(without_dwarf(&own[..40]).is_err());
    }
}
