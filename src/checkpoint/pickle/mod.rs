//! Pickles as inert data: runs the opcodes of a pickle without calling or importing anything.
//!
//! Facts: <https://github.com/python/cpython/blob/main/Lib/pickletools.py>. Protocols 2 to 5 are read. A global is a pair of
//! names and is never imported. Calls, objects and restored states become an [`Object`] with its class and arguments, which code
//! that knows the class can interpret. The memory for a hostile pickle is proportional to its length and limited: values are
//! small nodes in one list, texts are ranges of the input. The result is a graph, possibly with cycles and with exponentially
//! many paths: a walk must mark visited nodes.

mod machine;
#[cfg(test)]
mod tests;
mod value_cache;

use thiserror::Error;

use super::ReserveMemory;

/// Maximum bytes of a pickle.
pub const PICKLE_LEN_MAX: u64 = 256 << 20;
/// Maximum number of values other than small numbers and constants.
pub const NODES_MAX: usize = 1 << 24;
/// Maximum number of members of all containers.
pub const ITEMS_MAX: usize = 1 << 25;
/// Maximum depth of the stack.
pub const STACK_MAX: usize = 1 << 20;
/// Maximum number of memo entries.
pub const MEMO_MAX: usize = 1 << 25;

/// Reason why bytes are not a pickle that this version reads.
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
    /// Checked once: a pickle can refer to a long text very often.
    texts: Vec<&'a str>,
    items: Vec<Ref>,
    objects: Vec<Object>,
    root: Ref,
}

/// A value of a pickle: a small integer or constant, or the number of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ref(u32);

/// A value, one level deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'p> {
    /// An opaque value: None, a boolean, a float, bytes, an integer beyond 64 bits, or text that is not UTF-8.
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
    /// Alternating keys and values.
    Dict(&'p [Ref]),
    /// An object that code would have created.
    Object(Object),
    /// An object outside the pickle, with its description.
    Persistent(Ref),
}

/// An object that a call of `class` would have created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Callable.
    pub class: Ref,
    /// Arguments.
    pub args: Ref,
    /// State that would have been set.
    pub state: Ref,
    /// Items that would have been added: a dict, a sequence, or none.
    pub items: Ref,
}

/// A value in 16 bytes.
#[derive(Clone, Copy, Debug)]
enum Node {
    Int(i64),
    Text(u32),
    Global {
        module: Ref,
        name: Ref,
    },
    Tuple(Extent),
    /// A pure tuple: only small numbers, constants and pure tuples. Equal ones share a node.
    Pure(Extent),
    List(Extent),
    Dict(Extent),
    Object(u32),
    /// An immutable object created from a pure tuple; equal ones share a node.
    Frozen(u32),
    Persistent(Ref),
}

/// Members of a container among `items`.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    start: u32,
    len: u32,
    /// Capacity.
    capacity: u32,
}

impl Ref {
    const SMALL: u32 = 1 << 30;
    /// A value of no interest.
    pub const INERT: Self = Self(1 << 31);
    const EMPTY: Self = Self(1 << 31 | 1);

    /// Number of its node, which is the identity of a container.
    pub const fn node(self) -> Option<u32> {
        if self.0 < Self::SMALL { Some(self.0) } else { None }
    }
}

impl<'a> Pickle<'a> {
    /// Parses `bytes`, which must be exactly one pickle. Reserves the memory for its values as it grows: up to 30 bytes for one.
    ///
    /// # Errors
    /// Another protocol, an opcode that no pickler of these protocols writes, opcodes that do not fit together, a length
    /// beyond the bytes, or more of anything than the limits allow, or the memory that `reserve` has.
    pub fn parse(bytes: &'a [u8], reserve: ReserveMemory<'_>) -> Result<Self, ParseError> {
        machine::run(bytes, reserve)
    }

    /// Value of the whole pickle.
    #[must_use]
    pub const fn root(&self) -> Ref {
        self.root
    }

    /// Number of nodes.
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
            Node::Text(text) => self.texts.get(text as usize).map_or(Value::Inert, |text| Value::Text(text)),
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
            Node::Text(text) => self.texts.get(text as usize).copied(),
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

    /// True if a value is the global `module.name`.
    #[must_use]
    pub fn is(&self, at: Ref, module: &str, name: &str) -> bool {
        self.value(at) == Value::Global { module, name }
    }

    /// Bytes of memory, without those of the pickle.
    const fn memory(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + self.texts.capacity() * size_of::<&str>()
            + self.items.capacity() * size_of::<Ref>()
            + self.objects.capacity() * size_of::<Object>()
    }

    fn members(&self, extent: Extent) -> &[Ref] {
        self.items.get(extent.start as usize..(extent.start + extent.len) as usize).unwrap_or_default()
    }
}
