//! Pickles as inert data: a machine that runs a pickle's opcodes and nothing else.
//!
//! Facts: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>. Protocols 2 to 5 are read. A global is two names
//! and is never looked up; what a pickle would have called, made or restored is an [`Object`] that keeps its class and
//! arguments, so that whoever knows the class can read it and anybody can walk through it. A hostile pickle costs memory in
//! proportion to its length and up to fixed limits: values are small nodes in one list, texts stay where they are.
//! The result is a graph, perhaps with cycles, in which doubling by memo costs nothing: a walk must mark visited nodes.

mod alike;
mod machine;
#[cfg(test)]
mod tests;

use thiserror::Error;

/// Bytes in a pickle, at most.
pub const PICKLE_LEN_MAX: u64 = 256 << 20;
/// Values that are more than a small number or a constant, at most.
pub const NODES_MAX: usize = 1 << 24;
/// Members of all containers, at most.
pub const ITEMS_MAX: usize = 1 << 25;
/// Values that wait to become part of others, at most.
pub const STACK_MAX: usize = 1 << 20;
/// Values that are remembered, at most.
pub const MEMO_MAX: usize = 1 << 25;

/// Why bytes are not a pickle that this version reads.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{what} at byte {at} of the pickle")]
pub struct ParseError {
    /// Fault.
    pub what: &'static str,
    /// Offset of the opcode.
    pub at: usize,
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node>,
    items: Vec<Ref>,
    objects: Vec<Object>,
    root: Ref,
}

/// A value of a pickle: small integers and constants in themselves, others by the number of their node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ref(u32);

/// A value, one level deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'p> {
    /// None, a truth value, a float, bytes, an integer beyond 64 bits, or text that is not UTF-8: nothing to look into.
    Inert,
    /// An integer.
    Int(i64),
    /// Text.
    Text(&'p str),
    /// A name of something in a module, as written.
    Global {
        /// The module.
        module: &'p str,
        /// The name.
        name: &'p str,
    },
    /// The members of a tuple, list or set.
    Sequence(&'p [Ref]),
    /// Keys and values by turns.
    Dict(&'p [Ref]),
    /// An object that code would have made.
    Object(Object),
    /// An object outside the pickle, with its description.
    Persistent(Ref),
}

/// An object that a call of `class` would have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Callable.
    pub class: Ref,
    /// With which arguments.
    pub args: Ref,
    /// The state it would have been given.
    pub state: Ref,
    /// Items that would have been put into it: a dict or a sequence, or nothing.
    pub items: Ref,
}

/// A value in 16 bytes.
#[derive(Clone, Copy, Debug)]
enum Node {
    Int(i64),
    Text {
        at: u32,
        len: u32,
    },
    Global {
        module: Ref,
        name: Ref,
    },
    Tuple(Extent),
    /// A tuple of nothing but small numbers, constants and such tuples: kept once for all that are alike.
    Pure(Extent),
    List(Extent),
    Dict(Extent),
    Object(u32),
    /// An object that is made from a pure tuple and never changes: kept once, too.
    Frozen(u32),
    Persistent(Ref),
}

/// Members of a container among `items`.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    start: u32,
    len: u32,
    /// Length that it may grow to without being moved.
    room: u32,
}

impl Ref {
    const SMALL: u32 = 1 << 30;
    /// A value of no interest.
    pub const INERT: Self = Self(1 << 31);
    const EMPTY: Self = Self(1 << 31 | 1);

    /// The number of its node, which tells containers that are the same apart from those that are equal.
    pub const fn node(self) -> Option<u32> {
        if self.0 < Self::SMALL { Some(self.0) } else { None }
    }
}

impl<'a> Pickle<'a> {
    /// Reads the one pickle that `bytes` are.
    ///
    /// # Errors
    /// Another protocol, an opcode that no pickler of these protocols writes, opcodes that do not fit together, a length
    /// beyond the bytes, or more of anything than the limits allow.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ParseError> {
        machine::run(bytes)
    }

    /// Value of the whole pickle.
    #[must_use]
    pub const fn root(&self) -> Ref {
        self.root
    }

    /// Values that have a node: those that [`Ref::node`] numbers.
    #[must_use]
    pub const fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// A value, one level deep.
    #[must_use]
    pub fn value(&self, at: Ref) -> Value<'_> {
        if at == Ref::EMPTY {
            return Value::Sequence(&[]);
        }
        let Some(node) = at.node().and_then(|node| self.nodes.get(node as usize)) else {
            let small = at.0 & !Ref::SMALL;
            return if at.0 & Ref::INERT.0 == 0 { Value::Int(small.into()) } else { Value::Inert };
        };
        match *node {
            Node::Int(int) => Value::Int(int),
            Node::Text { at, len } => self.text_at(at, len).map_or(Value::Inert, Value::Text),
            Node::Global { module, name } => match (self.text(module), self.text(name)) {
                (Some(module), Some(name)) => Value::Global { module, name },
                _ => Value::Inert,
            },
            Node::Tuple(extent) | Node::Pure(extent) | Node::List(extent) => Value::Sequence(self.members(extent)),
            Node::Dict(extent) => Value::Dict(self.members(extent)),
            Node::Object(object) | Node::Frozen(object) => {
                self.objects.get(object as usize).map_or(Value::Inert, |&one| Value::Object(one))
            }
            Node::Persistent(of) => Value::Persistent(of),
        }
    }

    /// The text that a value is.
    #[must_use]
    pub fn text(&self, at: Ref) -> Option<&str> {
        match *self.nodes.get(at.node()? as usize)? {
            Node::Text { at, len } => self.text_at(at, len),
            _ => None,
        }
    }

    /// The number, not negative, that a value is.
    #[must_use]
    pub fn number(&self, at: Ref) -> Option<u64> {
        match self.value(at) {
            Value::Int(int) => u64::try_from(int).ok(),
            _ => None,
        }
    }

    /// The members of a tuple, list or set.
    #[must_use]
    pub fn sequence(&self, at: Ref) -> Option<&[Ref]> {
        match self.value(at) {
            Value::Sequence(members) => Some(members),
            _ => None,
        }
    }

    /// Value of the key `key` in a dict.
    #[must_use]
    pub fn entry(&self, dict: Ref, key: &str) -> Option<Ref> {
        let Value::Dict(members) = self.value(dict) else { return None };
        members.chunks_exact(2).find(|pair| self.text(pair[0]) == Some(key)).map(|pair| pair[1])
    }

    /// Whether a value is the global `module.name`.
    #[must_use]
    pub fn is(&self, at: Ref, module: &str, name: &str) -> bool {
        self.value(at) == Value::Global { module, name }
    }

    fn text_at(&self, at: u32, len: u32) -> Option<&str> {
        let bytes = self.bytes.get(at as usize..)?.get(..len as usize)?;
        std::str::from_utf8(bytes).ok()
    }

    fn members(&self, extent: Extent) -> &[Ref] {
        self.items.get(extent.start as usize..(extent.start + extent.len) as usize).unwrap_or_default()
    }
}
