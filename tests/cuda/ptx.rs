//! An interpreter of PTX, NVIDIA's assembly for GPUs (<https://docs.nvidia.com/cuda/parallel-thread-execution/>), for tests: the
//! instructions that src/staging/cuda/kernels/kernels.ptx has, and no others.
//!
//! The threads of a block run one after the other, each up to the next barrier. Values are kept as 64 bits, those of shorter registers
//! extended with zeros. Reads and writes outside of allocated memory are for the caller to find.

use std::collections::HashMap;

/// Memory of the GPU.
pub(super) trait Memory {
    /// The `len` bytes at `address`.
    fn bytes(&mut self, address: u64, len: usize) -> &mut [u8];
}

/// The kernels of one text.
#[derive(Debug, Default)]
pub(super) struct Module {
    pub(super) kernels: HashMap<String, Kernel>,
}

#[derive(Debug, Default)]
pub(super) struct Kernel {
    /// Bytes of each parameter.
    pub(super) parameters: Vec<usize>,
    code: Vec<Instruction>,
    registers: usize,
    /// Bytes of shared memory.
    shared: usize,
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 2],
    pub(super) threads: u32,
}

#[derive(Clone, Copy, Debug)]
struct Instruction {
    /// Predicate register, and the value that it must have.
    guard: Option<(usize, bool)>,
    does: Does,
    /// Bits of the operands.
    bits: u32,
    signed: bool,
    out: usize,
    inputs: [Operand; 4],
}

#[derive(Clone, Copy, Debug)]
enum Operand {
    Register(usize),
    Value(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Global,
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Move,
    Add,
    Subtract,
    Multiply,
    /// With a product of twice the bits.
    MultiplyWide,
    MultiplyAdd,
    Divide,
    Minimum,
    Maximum,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    /// The upper word of two, rotated left.
    FunnelLeft,
    ReverseBits,
    InsertBits,
    UpperHalf,
    Select,
    Set(Compare),
    /// Reads the parameter of that number.
    Parameter(usize),
    Load(Space),
    Store(Space),
    AtomicAdd,
    Branch,
    Barrier,
    Return,
}

/// Registers that are set before a thread runs.
const SPECIAL: [&str; 6] = ["%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%nctaid.x", "%nctaid.y"];

impl Module {
    /// Parses a text.
    ///
    /// # Errors
    /// Unknown instructions and directives, with their line.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut module = Self::default();
        let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
        while let Some(line) = lines.next() {
            let Some(name) = line.strip_prefix(".visible .entry ") else { continue };
            let name = name.trim_end_matches('(').to_owned();
            let parameters: Vec<&str> = lines.by_ref().take_while(|line| *line != ")").collect();
            let body: Vec<&str> = lines.by_ref().skip(1).take_while(|line| *line != "}").collect();
            let kernel = Parser::default().kernel(&parameters, &body).map_err(|error| format!("{name}: {error}"))?;
            module.kernels.insert(name, kernel);
        }
        Ok(module)
    }
}

#[derive(Default)]
struct Parser {
    registers: HashMap<String, usize>,
    symbols: HashMap<String, u64>,
    parameters: HashMap<String, usize>,
    labels: HashMap<String, usize>,
}

impl Parser {
    fn kernel(mut self, parameters: &[&str], body: &[&str]) -> Result<Kernel, String> {
        let mut kernel = Kernel::default();
        for name in SPECIAL {
            self.register(name);
        }
        for (number, line) in parameters.iter().enumerate() {
            let mut words = line.trim_end_matches(',').split_whitespace().skip(1);
            let (kind, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            kernel.parameters.push(if kind == ".u64" { 8 } else { 4 });
            self.parameters.insert(name.to_owned(), number);
        }
        let mut code: Vec<&str> = Vec::new();
        // Braces that are indented surround registers of a few lines.
        for line in body.iter().map(|line| line.trim()).filter(|line| !["", "{", "}"].contains(line)) {
            if let Some(label) = line.strip_suffix(':') {
                self.labels.insert(label.to_owned(), code.iter().map(|line| pieces(line)).sum());
            } else if let Some(shared) = line.strip_prefix(".shared .align ") {
                let declared = shared.split_whitespace().nth(2).unwrap_or_default().trim_end_matches(';');
                let (align, (name, len)) =
                    (shared.split(' ').next(), declared.split_once('[').unwrap_or((declared, "")));
                let align: usize = align.and_then(|align| align.parse().ok()).ok_or("alignment")?;
                let bytes = match (len.trim_end_matches(']').parse(), shared.contains(".u32")) {
                    (Ok(bytes), _) => bytes,
                    (Err(_), true) => 4,
                    (Err(_), false) => return Err(line.to_owned()),
                };
                kernel.shared = kernel.shared.next_multiple_of(align);
                self.symbols.insert(name.to_owned(), kernel.shared as u64);
                kernel.shared += bytes;
            } else if !line.starts_with('.') {
                code.push(line);
            }
        }
        for line in code {
            let parsed = self.line(line).map_err(|error| format!("{error}: {line}"))?;
            kernel.code.extend(parsed);
        }
        kernel.registers = self.registers.len();
        Ok(kernel)
    }

    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn operand(&mut self, text: &str) -> Operand {
        match text.parse::<i64>() {
            Ok(number) => Operand::Value(number.cast_unsigned()),
            Err(_) if text.starts_with('%') => Operand::Register(self.register(text)),
            Err(_) => Operand::Value(self.symbols.get(text).copied().unwrap_or_else(|| panic!("no symbol {text}"))),
        }
    }

    /// Register or symbol, and offset, of `[a+b]`.
    fn address(&mut self, text: &str) -> (Operand, u64) {
        let inner = text.trim_start_matches('[').trim_end_matches(']');
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        (self.operand(base), offset.parse::<i64>().unwrap_or_else(|_| panic!("{text}")).cast_unsigned())
    }

    fn line(&mut self, line: &str) -> Result<Vec<Instruction>, String> {
        // The form in which LLVM takes the upper half of a register.
        if let Some(upper) = line.strip_prefix("{ .reg .b32 tmp; mov.b64 {tmp, ") {
            let (out, from) = upper.split_once("}, ").ok_or("halves")?;
            let from = self.operand(from.trim_end_matches("; }"));
            return Ok(vec![Instruction { inputs: inputs([from]), ..self.to(out, Does::UpperHalf, 64) }]);
        }
        let line = line.trim_end_matches(';');
        let (guard, line) = match line.strip_prefix('@') {
            Some(guarded) => {
                let (name, rest) = guarded.split_once(char::is_whitespace).ok_or("guard")?;
                let register = self.register(name.trim_start_matches('!'));
                (Some((register, !name.starts_with('!'))), rest.trim())
            }
            None => (None, line),
        };
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest: Vec<&str> =
            rest.split(',').map(|part| part.trim().trim_matches(['{', '}'])).filter(|part| !part.is_empty()).collect();
        let mut parsed = self.instruction(name, &rest)?;
        parsed.iter_mut().for_each(|instruction| instruction.guard = guard);
        Ok(parsed)
    }

    fn to(&mut self, out: &str, does: Does, bits: u32) -> Instruction {
        let out = self.register(out);
        Instruction { guard: None, does, bits, signed: false, out, inputs: inputs([]) }
    }

    fn instruction(&mut self, name: &str, rest: &[&str]) -> Result<Vec<Instruction>, String> {
        let parts: Vec<&str> = name.split('.').collect();
        let kind = parts.last().copied().unwrap_or_default();
        let bits = kind.get(1..).and_then(|bits| bits.parse().ok()).unwrap_or(1);
        let first = rest.first().copied().unwrap_or_default();
        if let "bra" | "ret" | "bar" = parts[0] {
            let target = if parts[0] == "bra" { *self.labels.get(first).ok_or("label")? } else { 0 };
            let does = match parts[0] {
                "bra" => Does::Branch,
                "ret" => Does::Return,
                _ => Does::Barrier,
            };
            return Ok(vec![Instruction { inputs: inputs([Operand::Value(target as u64)]), ..self.to("", does, 0) }]);
        }
        let space = if parts.contains(&"shared") { Space::Shared } else { Space::Global };
        match (parts[0], parts.get(1).copied()) {
            ("ld", Some("param")) => {
                let name = rest.get(1).ok_or("parameter")?.trim_matches(['[', ']']);
                let number = *self.parameters.get(name).ok_or("parameter")?;
                return Ok(vec![self.to(first, Does::Parameter(number), bits)]);
            }
            ("ld", _) => {
                let (targets, from) = rest.split_at(rest.len() - 1);
                let (base, offset) = self.address(from[0]);
                let loads = targets.iter().zip(0u64..).map(|(out, number)| {
                    let offset = Operand::Value(offset + number * u64::from(bits / 8));
                    Instruction { inputs: inputs([base, offset]), ..self.to(out, Does::Load(space), bits) }
                });
                return Ok(loads.collect());
            }
            ("st", _) => {
                let ((base, offset), value) = (self.address(first), self.operand(rest.get(1).ok_or("value")?));
                let inputs = inputs([base, Operand::Value(offset), value]);
                return Ok(vec![Instruction { inputs, ..self.to("", Does::Store(space), bits) }]);
            }
            ("atom", _) => {
                let ((base, offset), value) =
                    (self.address(rest.get(1).ok_or("address")?), self.operand(rest.get(2).ok_or("value")?));
                let inputs = inputs([base, Operand::Value(offset), value]);
                return Ok(vec![Instruction { inputs, ..self.to(first, Does::AtomicAdd, bits) }]);
            }
            _ => {}
        }
        let does = computation(&parts).ok_or("unknown instruction")?;
        // Conversions keep as many bits as the shorter of both types.
        let bits = match (parts[0], parts.get(1)) {
            ("cvt", Some(to)) => to.get(1..).and_then(|to| to.parse().ok()).unwrap_or(bits).min(bits),
            _ => bits,
        };
        let given: Vec<Operand> = rest.get(1..).unwrap_or_default().iter().map(|text| self.operand(text)).collect();
        let mut inputs = inputs([]);
        inputs.iter_mut().zip(given).for_each(|(to, given)| *to = given);
        let signed = kind.starts_with('s');
        if signed
            && matches!(
                does,
                Does::Move | Does::MultiplyWide | Does::Divide | Does::Minimum | Does::Maximum | Does::ShiftRight
            )
        {
            return Err("unknown for signed numbers".to_owned());
        }
        Ok(vec![Instruction { signed, inputs, ..self.to(first, does, bits) }])
    }
}

/// Computation of an instruction with such a name; none, if it is not known.
fn computation(parts: &[&str]) -> Option<Does> {
    Some(match (*parts.first()?, parts.get(1).copied().unwrap_or_default()) {
        ("mov" | "cvt" | "cvta", _) => Does::Move,
        ("add", _) => Does::Add,
        ("sub", _) => Does::Subtract,
        ("mul", "lo") => Does::Multiply,
        ("mul", "wide") => Does::MultiplyWide,
        ("mad", "lo") => Does::MultiplyAdd,
        ("div", _) => Does::Divide,
        ("min", _) => Does::Minimum,
        ("max", _) => Does::Maximum,
        ("and", _) => Does::And,
        ("or", _) => Does::Or,
        ("xor", _) => Does::Xor,
        ("shl", _) => Does::ShiftLeft,
        ("shr", _) => Does::ShiftRight,
        ("shf", "l") => Does::FunnelLeft,
        ("brev", _) => Does::ReverseBits,
        ("bfi", _) => Does::InsertBits,
        ("selp", _) => Does::Select,
        ("setp", compare) => Does::Set(match compare {
            "eq" => Compare::Equal,
            "ne" => Compare::NotEqual,
            "lt" => Compare::Less,
            "le" => Compare::LessOrEqual,
            "gt" => Compare::Greater,
            "ge" => Compare::GreaterOrEqual,
            _ => return None,
        }),
        _ => return None,
    })
}

/// Instructions that one line becomes: as many as a load has targets.
fn pieces(line: &str) -> usize {
    let is_vector = line.contains(".v2.") || line.contains(".v4.");
    if is_vector { line.split(']').next().unwrap_or_default().matches(',').count() } else { 1 }
}

fn inputs<const N: usize>(given: [Operand; N]) -> [Operand; 4] {
    let mut all = [Operand::Value(0); 4];
    all.iter_mut().zip(given).for_each(|(to, given)| *to = given);
    all
}

struct Thread {
    registers: Vec<u64>,
    at: usize,
    ended: bool,
}

impl Kernel {
    /// Runs one block of a launch.
    pub(super) fn run_block(&self, grid: Grid, block: [u32; 2], arguments: &[u64], memory: &mut dyn Memory) {
        let mut shared = vec![0xa5; self.shared];
        let thread = |number| {
            let mut registers = vec![0; self.registers];
            let special = [number, grid.threads, block[0], block[1], grid.blocks[0], grid.blocks[1]];
            registers.iter_mut().zip(special).for_each(|(to, value)| *to = u64::from(value));
            Thread { registers, at: 0, ended: false }
        };
        let mut threads: Vec<Thread> = (0..grid.threads).map(thread).collect();
        while threads.iter().any(|thread| !thread.ended) {
            for thread in threads.iter_mut().filter(|thread| !thread.ended) {
                self.run_to_barrier(thread, arguments, &mut shared, memory);
            }
        }
    }

    fn run_to_barrier(&self, thread: &mut Thread, arguments: &[u64], shared: &mut [u8], memory: &mut dyn Memory) {
        let registers = thread.registers.as_mut_slice();
        loop {
            let Instruction { guard, does, bits, signed, out, inputs } = self.code[thread.at];
            thread.at += 1;
            if guard.is_some_and(|(register, wanted)| (registers[register] != 0) != wanted) {
                continue;
            }
            let [a, b, c, d] = inputs.map(|input| match input {
                Operand::Register(number) => registers[number],
                Operand::Value(value) => value,
            });
            let value = match does {
                Does::Return => {
                    thread.ended = true;
                    return;
                }
                Does::Barrier => return,
                Does::Branch => {
                    thread.at = usize::try_from(a).unwrap();
                    continue;
                }
                Does::Store(space) => {
                    let (address, len) = (a.wrapping_add(b), bits as usize / 8);
                    bytes(space, address, len, shared, memory).copy_from_slice(&c.to_le_bytes()[..len]);
                    continue;
                }
                Does::Load(space) => {
                    let mut word = [0; 8];
                    let len = bits as usize / 8;
                    word[..len].copy_from_slice(bytes(space, a.wrapping_add(b), len, shared, memory));
                    u64::from_le_bytes(word)
                }
                Does::AtomicAdd => {
                    let slot = bytes(Space::Global, a.wrapping_add(b), 4, shared, memory);
                    let before = u32::from_le_bytes(slot.try_into().unwrap());
                    slot.copy_from_slice(
                        &before.wrapping_add(u32::try_from(c & u64::from(u32::MAX)).unwrap()).to_le_bytes(),
                    );
                    u64::from(before)
                }
                Does::Parameter(number) => arguments[number],
                does => computed(does, (bits, signed), [a, b, c, d]),
            };
            // A wide product has twice the bits.
            let kept = if does == Does::MultiplyWide { 2 * bits } else { bits };
            registers[out] = value & mask(kept);
        }
    }
}

/// Result of an instruction that neither uses memory nor jumps.
fn computed(does: Does, (bits, signed): (u32, bool), [a, b, c, d]: [u64; 4]) -> u64 {
    let (x, y) = (a & mask(bits), b & mask(bits));
    match does {
        Does::Move => x,
        Does::Add => x.wrapping_add(y),
        Does::Subtract => x.wrapping_sub(y),
        Does::Multiply => x.wrapping_mul(y),
        Does::MultiplyWide => x * y,
        Does::MultiplyAdd => x.wrapping_mul(y).wrapping_add(c),
        Does::Divide => x / y,
        Does::Minimum => x.min(y),
        Does::Maximum => x.max(y),
        Does::And => x & y,
        Does::Or => x | y,
        Does::Xor => x ^ y,
        Does::ShiftLeft => {
            if b >= u64::from(bits) {
                0
            } else {
                x << b
            }
        }
        Does::ShiftRight => {
            if b >= u64::from(bits) {
                0
            } else {
                x >> b
            }
        }
        Does::FunnelLeft => ((y << 32 | x) << (c & 31)) >> 32,
        Does::ReverseBits => x.reverse_bits() >> (64 - bits),
        Does::InsertBits => {
            let field = ((1u64 << d.min(63)) - 1) << c;
            (y & !field) | (x << c & field)
        }
        Does::UpperHalf => a >> 32,
        Does::Select => {
            if c == 0 {
                y
            } else {
                x
            }
        }
        Does::Set(compare) => {
            // Flipped sign bits order signed numbers as unsigned ones.
            let flip = if signed { 1u64 << (bits.max(1) - 1) } else { 0 };
            let (x, y) = (x ^ flip, y ^ flip);
            u64::from(match compare {
                Compare::Equal => x == y,
                Compare::NotEqual => x != y,
                Compare::Less => x < y,
                Compare::LessOrEqual => x <= y,
                Compare::Greater => x > y,
                Compare::GreaterOrEqual => x >= y,
            })
        }
        _ => panic!("{does:?} computes nothing"),
    }
}

/// The lowest bits.
fn mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

fn bytes<'m>(space: Space, address: u64, len: usize, shared: &'m mut [u8], memory: &'m mut dyn Memory) -> &'m mut [u8] {
    assert!(address.is_multiple_of(len as u64), "unaligned access of {len} bytes at {address:#x}");
    match space {
        Space::Global => memory.bytes(address, len),
        Space::Shared => {
            let at = usize::try_from(address).unwrap();
            shared
                .get_mut(at..at + len)
                .unwrap_or_else(|| panic!("access of {len} bytes of shared memory at {address}"))
        }
    }
}
