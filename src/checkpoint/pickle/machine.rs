//! The pickle machine: a stack, marks, a memo, and a loop over opcodes.

use super::value_cache::ValueCache;
use super::{Extent, ITEMS_MAX, MEMO_MAX, NODES_MAX, Node, Object, PICKLE_LEN_MAX, ParseError, Pickle, Ref, STACK_MAX};
use crate::checkpoint::{Growth, ReserveMemory};

/// Reason why the machine stopped; its loop adds the offset.
type Step<T = ()> = Result<T, &'static str>;

/// Opcodes between two looks at the memory: few enough that it has grown by little meanwhile.
const OPCODES_UNCOUNTED: u32 = 256;

/// Runs a whole pickle.
pub(super) fn run<'a>(bytes: &'a [u8], reserve: ReserveMemory<'_>) -> Result<Pickle<'a>, ParseError> {
    if bytes.len() as u64 > PICKLE_LEN_MAX {
        return Err(ParseError { what: "more bytes than a pickle may have", at: bytes.len() });
    }
    let (nodes, texts, items, objects) = Default::default();
    let pickle = Pickle { bytes, nodes, texts, items, objects, root: Ref::INERT };
    let alike = ValueCache::new(bytes.len());
    let mut machine =
        Machine { pickle, at: 0, stack: Vec::new(), marks: Vec::new(), memo: Vec::new(), alike, frozen: None };
    machine.begin().map_err(|what| ParseError { what, at: 0 })?;
    let mut memory = Growth::new(reserve);
    loop {
        for _ in 0..OPCODES_UNCOUNTED {
            let at = machine.at;
            match machine.step() {
                Ok(true) => {}
                Ok(false) => return Ok(machine.pickle),
                Err(what) => return Err(ParseError { what, at }),
            }
        }
        if !memory.is_reserved(machine.memory()) {
            return Err(ParseError { what: "its values take too much memory (--memory)", at: machine.at });
        }
    }
}

struct Machine<'a> {
    pickle: Pickle<'a>,
    at: usize,
    stack: Vec<Ref>,
    /// Length of the stack at each mark.
    marks: Vec<usize>,
    memo: Vec<Ref>,
    alike: ValueCache,
    /// The class whose objects are frozen, once it was seen.
    frozen: Option<Ref>,
}

impl Machine<'_> {
    /// Bytes of memory. A list that grows is there twice for a moment.
    fn memory(&self) -> usize {
        let (stack, memo) = (self.stack.capacity(), self.memo.capacity());
        self.pickle.memory() + (stack + memo) * size_of::<Ref>() + self.marks.capacity() * size_of::<usize>()
    }

    fn begin(&mut self) -> Step {
        match self.take(2)? {
            [0x80, 2..=5] => Ok(()),
            [0x80, _] => Err("protocol is none of 2 to 5"),
            _ => Err("pickle does not begin with its protocol"),
        }
    }

    /// One opcode; false at the end.
    fn step(&mut self) -> Step<bool> {
        let code = self.u8()?;
        match code {
            b'.' => return self.end().map(|()| false),
            b'(' => self.mark()?,
            b'0' => self.pop_or_mark()?,
            b'1' => drop(self.since_mark()?.len()),
            b'2' => {
                let top = self.top()?;
                self.push(top)?;
            }
            0x95 => {
                let len = self.len(8)?;
                if len > self.pickle.bytes.len() - self.at {
                    return Err("frame reaches beyond the pickle");
                }
            }
            b'J' | b'K' | b'M' | b'N' | b'G' | 0x88..=0x8b => self.number(code)?,
            b'X' | b'B' | b'C' | b'T' | b'U' | 0x8c..=0x8e | 0x96 => self.string(code)?,
            b')' | b']' | b'}' | 0x8f | b't' | b'l' | b'd' | 0x85..=0x87 | 0x91 => self.container(code)?,
            b'a' | b'e' | b's' | b'u' | 0x90 => self.fill(code)?,
            b'c' | b'R' | b'b' | b'Q' | 0x81 | 0x92 | 0x93 => self.object(code)?,
            b'q' | b'r' | b'h' | b'j' | 0x94 => self.memo(code)?,
            _ => return Err("opcode is none that is read"),
        }
        Ok(true)
    }

    fn end(&mut self) -> Step {
        self.pickle.root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err("pickle ends with values left over");
        }
        if self.at == self.pickle.bytes.len() { Ok(()) } else { Err("bytes follow the pickle") }
    }

    fn number(&mut self, code: u8) -> Step {
        let value = match code {
            b'J' => i64::from(i32::from_le_bytes(self.array()?)),
            b'K' => i64::from(self.u8()?),
            b'M' => i64::from(u16::from_le_bytes(self.array()?)),
            0x8a | 0x8b => {
                let len = self.len(if code == 0x8a { 1 } else { 4 })?;
                match long(self.take(len)?) {
                    Some(value) => value,
                    None => return self.push(Ref::INERT),
                }
            }
            b'G' => return self.take(8).and_then(|_| self.push(Ref::INERT)),
            // None, true, false.
            _ => return self.push(Ref::INERT),
        };
        match u32::try_from(value) {
            Ok(small) if small < Ref::SMALL => self.push(Ref(Ref::SMALL | small)),
            _ => self.push_node(Node::Int(value)),
        }
    }

    /// Pushes a text; bytes are skipped, except short strings of protocol 2, as Python 2 writes them.
    fn string(&mut self, code: u8) -> Step {
        let width = match code {
            b'X' | b'B' | b'T' => 4,
            0x8d | 0x8e | 0x96 => 8,
            _ => 1,
        };
        let len = self.len(width)?;
        let bytes = self.take(len)?;
        if matches!(code, b'B' | b'C' | 0x8e | 0x96) {
            return self.push(Ref::INERT);
        }
        let text = self.text(bytes)?;
        self.push(text)
    }

    fn container(&mut self, code: u8) -> Step {
        match code {
            b')' => return self.push(Ref::EMPTY),
            b']' | 0x8f => return self.push_node(Node::List(Extent::default())),
            b'}' => return self.push_node(Node::Dict(Extent::default())),
            _ => {}
        }
        let from = match code {
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub(usize::from(code - 0x84)).ok_or("stack is empty")?;
                if from < self.floor() { Err("stack is empty") } else { Ok(from) }
            }
            _ => self.unmark(),
        }?;
        if code == b'd' && !(self.stack.len() - from).is_multiple_of(2) {
            return Err("key without a value");
        }
        if !matches!(code, b'l' | b'd') {
            return self.push_tuple(from);
        }
        let extent = self.grown(Extent::default(), from)?;
        self.push_node(if code == b'l' { Node::List(extent) } else { Node::Dict(extent) })
    }

    /// Makes a tuple of the stack from `from` on, or reuses an equal one.
    fn push_tuple(&mut self, from: usize) -> Step {
        let members = self.stack.get(from..).unwrap_or_default();
        if !ValueCache::is_pure(&self.pickle, members) {
            let extent = self.grown(Extent::default(), from)?;
            return self.push_node(Node::Tuple(extent));
        }
        let (slot, found) = self.alike.tuple(&self.pickle, members);
        if let Some(node) = found {
            self.stack.truncate(from);
            return self.push(Ref(node));
        }
        let extent = self.grown(Extent::default(), from)?;
        let node = self.node(Node::Pure(extent))?;
        self.alike.keep(slot, node);
        self.push(Ref(node))
    }

    /// Adds the values on top of the stack to the container below.
    fn fill(&mut self, code: u8) -> Step {
        let from = match code {
            b'a' => self.stack.len().checked_sub(1).ok_or("stack is empty")?,
            b's' => self.stack.len().checked_sub(2).ok_or("stack is empty")?,
            _ => self.unmark()?,
        };
        let below = from.checked_sub(1).filter(|&below| below >= self.floor()).ok_or("stack is empty")?;
        let into = self.stack.get(below).copied().ok_or("stack is empty")?;
        let pairs = matches!(code, b's' | b'u');
        if pairs && !(self.stack.len() - from).is_multiple_of(2) {
            return Err("key without a value");
        }
        let node = into.node().ok_or("members are given to what holds none")?;
        let node = match self.pickle.nodes.get(node as usize).copied() {
            Some(Node::Object(object)) => self.items_of(object, pairs)?,
            _ => node,
        };
        let extent = match self.pickle.nodes.get(node as usize) {
            Some(Node::Dict(extent)) if pairs => *extent,
            Some(Node::List(extent)) if !pairs => *extent,
            _ => return Err("members are given to what holds none"),
        };
        let extent = self.grown(extent, from)?;
        if let Some(node) = self.pickle.nodes.get_mut(node as usize) {
            *node = if pairs { Node::Dict(extent) } else { Node::List(extent) };
        }
        Ok(())
    }

    /// Container for an object's members.
    fn items_of(&mut self, object: u32, pairs: bool) -> Step<u32> {
        let items = self.pickle.objects.get(object as usize).and_then(|object| object.items.node());
        if let Some(items) = items {
            return Ok(items);
        }
        let empty = Extent::default();
        let items = self.node(if pairs { Node::Dict(empty) } else { Node::List(empty) })?;
        if let Some(object) = self.pickle.objects.get_mut(object as usize) {
            object.items = Ref(items);
        }
        Ok(items)
    }

    fn object(&mut self, code: u8) -> Step {
        match code {
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.push_node(Node::Global { module, name })
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                self.push_node(Node::Global { module, name })
            }
            b'R' | 0x81 => {
                let (args, class) = (self.pop()?, self.pop()?);
                self.push_object(class, args)
            }
            0x92 => {
                let (named, args, class) = (self.pop()?, self.pop()?, self.pop()?);
                let args = self.tuple(&[args, named])?;
                self.push_object(class, args)
            }
            b'b' => {
                let state = self.pop()?;
                let built = self.top()?.node().and_then(|node| self.pickle.nodes.get(node as usize));
                let Some(&Node::Object(object)) = built else { return Err("state is given to what was not made") };
                if let Some(object) = self.pickle.objects.get_mut(object as usize) {
                    object.state = state;
                }
                Ok(())
            }
            _ => {
                let of = self.pop()?;
                self.push_node(Node::Persistent(of))
            }
        }
    }

    fn memo(&mut self, code: u8) -> Step {
        match code {
            b'h' | b'j' => {
                let at = self.len(if code == b'h' { 1 } else { 4 })?;
                let found = *self.memo.get(at).ok_or("memo holds no such value")?;
                return self.push(found);
            }
            _ => {}
        }
        let at = match code {
            b'q' => self.len(1)?,
            b'r' => self.len(4)?,
            _ => self.memo.len(),
        };
        let top = self.top()?;
        // Picklers number memo entries from 0 on.
        if at == self.memo.len() && at < MEMO_MAX {
            self.memo.push(top);
            return Ok(());
        }
        self.memo.get_mut(at).map(|known| *known = top).ok_or("memo is not filled in order")
    }
}

/// The parts that opcodes are made of.
impl<'a> Machine<'a> {
    fn take(&mut self, len: usize) -> Step<&'a [u8]> {
        let found = self.pickle.bytes.get(self.at..).and_then(|rest| rest.get(..len)).ok_or("pickle ends too early")?;
        self.at += len;
        Ok(found)
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| "pickle ends too early")
    }

    fn u8(&mut self) -> Step<u8> {
        self.array().map(|[byte]| byte)
    }

    /// A length of `width` bytes; one that does not fit is beyond the end of any pickle.
    fn len(&mut self, width: usize) -> Step<usize> {
        let number = self.take(width)?.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
        Ok(usize::try_from(number).unwrap_or(usize::MAX))
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Step<Ref> {
        let start = self.at;
        let rest = self.pickle.bytes.get(start..).unwrap_or_default();
        let len = rest.iter().position(|&byte| byte == b'\n').ok_or("pickle ends too early")?;
        let line = self.take(len)?;
        self.at += 1;
        self.text(line)
    }

    fn mark(&mut self) -> Step {
        if self.marks.len() == STACK_MAX {
            return Err("too many marks");
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Length of the stack at the last mark; values below are not accessible.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn unmark(&mut self) -> Step<usize> {
        self.marks.pop().ok_or("no mark")
    }

    fn since_mark(&mut self) -> Step<std::vec::Drain<'_, Ref>> {
        let from = self.unmark()?;
        Ok(self.stack.drain(from..))
    }

    fn pop_or_mark(&mut self) -> Step {
        if self.stack.len() > self.floor() { self.pop().map(|_| ()) } else { self.unmark().map(|_| ()) }
    }

    fn top(&self) -> Step<Ref> {
        let top = self.stack.last().copied().filter(|_| self.stack.len() > self.floor());
        top.ok_or("stack is empty")
    }

    fn pop(&mut self) -> Step<Ref> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn push(&mut self, value: Ref) -> Step {
        if self.stack.len() == STACK_MAX {
            return Err("too many values wait on the stack");
        }
        self.stack.push(value);
        Ok(())
    }

    fn node(&mut self, node: Node) -> Step<u32> {
        let number = self.pickle.nodes.len();
        if number == NODES_MAX {
            return Err("too many values");
        }
        self.pickle.nodes.push(node);
        u32::try_from(number).map_err(|_| "too many values")
    }

    fn push_node(&mut self, node: Node) -> Step {
        let node = self.node(node)?;
        self.push(Ref(node))
    }

    /// Text of these bytes; an inert value if it is not UTF-8.
    fn text(&mut self, bytes: &'a [u8]) -> Step<Ref> {
        let Ok(text) = std::str::from_utf8(bytes) else { return Ok(Ref::INERT) };
        let number = u32::try_from(self.pickle.texts.len()).map_err(|_| "too many values")?;
        self.pickle.texts.push(text);
        Ok(Ref(self.node(Node::Text(number))?))
    }

    fn tuple(&mut self, members: &[Ref]) -> Step<Ref> {
        let from = self.stack.len();
        self.stack.extend_from_slice(members);
        let extent = self.grown(Extent::default(), from)?;
        Ok(Ref(self.node(Node::Tuple(extent))?))
    }

    fn push_object(&mut self, class: Ref, args: Ref) -> Step {
        let pure = args.node().and_then(|node| self.pickle.nodes.get(node as usize));
        if !matches!(pure, Some(Node::Pure(_))) || !self.is_frozen(class) {
            let object = self.new_object(class, args)?;
            return self.push_node(Node::Object(object));
        }
        let (slot, found) = self.alike.made(&self.pickle, class, args);
        if let Some(node) = found {
            return self.push(Ref(node));
        }
        let object = self.new_object(class, args)?;
        let node = self.node(Node::Frozen(object))?;
        self.alike.keep(slot, node);
        self.push(Ref(node))
    }

    /// True for classes whose objects are immutable tuples, such as `torch.Size`.
    fn is_frozen(&mut self, class: Ref) -> bool {
        let frozen = self.frozen == Some(class) || self.pickle.is(class, "torch", "Size");
        if frozen {
            self.frozen = Some(class);
        }
        frozen
    }

    fn new_object(&mut self, class: Ref, args: Ref) -> Step<u32> {
        let number = u32::try_from(self.pickle.objects.len()).map_err(|_| "too many values")?;
        self.pickle.objects.push(Object { class, args, state: Ref::INERT, items: Ref::INERT });
        Ok(number)
    }

    /// Appends the stack from `from` on to `extent`. One without space moves to the end with twice the capacity, so that the cost
    /// of all moves is proportional to the values added.
    fn grown(&mut self, extent: Extent, from: usize) -> Step<Extent> {
        let items = &mut self.pickle.items;
        let added = self.stack.get(from..).unwrap_or_default();
        let (start, len) = (extent.start as usize, extent.len as usize);
        let wanted = len + added.len();
        let cut = |number: usize| u32::try_from(number).map_err(|_| "too many members");
        let grown = if wanted <= extent.capacity as usize {
            if let Some(free) = items.get_mut(start + len..start + wanted) {
                free.copy_from_slice(added);
            }
            Extent { len: cut(wanted)?, ..extent }
        } else {
            let capacity = if len == 0 { wanted } else { 2 * wanted };
            if items.len() + capacity > ITEMS_MAX {
                return Err("too many members");
            }
            let moved = items.len();
            items.extend_from_within(start..start + len);
            items.extend_from_slice(added);
            items.resize(moved + capacity, Ref::INERT);
            Extent { start: cut(moved)?, len: cut(wanted)?, capacity: cut(capacity)? }
        };
        self.stack.truncate(from);
        Ok(grown)
    }
}

/// A little-endian number in two's complement, of up to 64 bits.
fn long(bytes: &[u8]) -> Option<i64> {
    let mut wide = match bytes.last() {
        Some(last) if last & 0x80 != 0 => [0xff; 8],
        _ => [0; 8],
    };
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(wide))
}
