//! A walk through the pickle of a torch file: finds tensors, their names and their storages.

use std::collections::HashMap;

use super::{DEPTH_MAX, NAMES_LEN_MAX, ParseError, ROOT_NAME, dtypes};
use crate::checkpoint::pickle::{Object, Pickle, Ref, Value};
use crate::checkpoint::{Dtype, Elements, ReserveMemory, Tensor};
use crate::limits::{RANK_MAX, TENSOR_NAME_MAX, TENSORS_MAX};

/// Maximum number of functions that wrap a tensor: a parameter of a subclass has three.
const WRAPS_MAX: u32 = 8;
/// Maximum bytes of a storage's key, which torch makes of digits. A pickle can refer to one very often.
const KEY_LEN_MAX: usize = 255;
/// Bytes of memory for a storage: it is in two lists and in a table.
const STORAGE_WEIGHT: usize = 256;

/// Tensors of a pickle.
#[derive(Debug, Default)]
pub(super) struct Contents<'p> {
    pub(super) tensors: Vec<TensorRecord>,
    pub(super) storages: Vec<Stored<'p>>,
}

/// A tensor as the pickle describes it.
#[derive(Debug)]
pub(super) struct TensorRecord {
    pub(super) name: String,
    /// Storage that it is a view of.
    pub(super) storage: usize,
    /// None if it is not known.
    pub(super) dtype: Option<Dtype>,
    pub(super) shape: Box<[u64]>,
    /// Offset in the storage, in elements.
    pub(super) offset: u64,
    pub(super) row_major: bool,
}

/// A storage as the pickle describes it.
#[derive(Debug)]
pub(super) struct Stored<'p> {
    pub(super) key: &'p str,
    /// Bytes, if its type is known.
    pub(super) len: Option<u64>,
    /// Type of its elements, if its class determines it.
    dtype: Option<Dtype>,
    /// Type of its elements, if no tensor determines it.
    pub(super) elements: Option<Dtype>,
}

/// Finds everything in `pickle`. Each tensor is reserved before it is kept: a reference to one takes two bytes.
pub(super) fn read<'p>(pickle: &'p Pickle<'_>, reserve: ReserveMemory<'_>) -> Result<Contents<'p>, ParseError> {
    if !reserve(pickle.nodes() as u64) {
        return Err(ParseError::Memory);
    }
    let mut walk = Walk {
        pickle,
        reserve,
        reserved: 0,
        seen: vec![false; pickle.nodes()],
        steps: vec![Step { above: 0, depth: 0, part: PathPart::Place(0) }],
        to_visit: Vec::new(),
        keys: HashMap::new(),
        names_len: 0,
        contents: Contents::default(),
    };
    walk.meet(pickle.root(), 0)?;
    while let Some((value, at)) = walk.to_visit.pop() {
        walk.visit(value, at)?;
        walk.reserve_lists()?;
    }
    Ok(walk.contents)
}

/// A step of a path, from the container above it.
#[derive(Clone, Copy)]
struct Step {
    above: u32,
    depth: u32,
    part: PathPart,
}

#[derive(Clone, Copy)]
enum PathPart {
    Key(Ref),
    Place(usize),
}

struct Walk<'p, 'a, 'r> {
    pickle: &'p Pickle<'a>,
    reserve: ReserveMemory<'r>,
    /// Bytes that are reserved for the lists of this walk.
    reserved: usize,
    /// Visited values, by node. Each container is walked only once, so that cycles and exponentially many paths cost nothing; a
    /// tensor gets a name at each place where it is found.
    seen: Vec<bool>,
    /// Every step of every path; the first is the root.
    steps: Vec<Step>,
    to_visit: Vec<(Ref, u32)>,
    keys: HashMap<&'p str, usize>,
    names_len: usize,
    contents: Contents<'p>,
}

impl Walk<'_, '_, '_> {
    /// Reserves what the lists of the walk have grown by.
    fn reserve_lists(&mut self) -> Result<(), ParseError> {
        let bytes = self.steps.capacity() * size_of::<Step>()
            + self.to_visit.capacity() * size_of::<(Ref, u32)>()
            + self.contents.storages.len() * STORAGE_WEIGHT;
        if bytes > self.reserved {
            let more = bytes - self.reserved;
            self.reserved = bytes;
            if !(self.reserve)(more as u64) {
                return Err(ParseError::Memory);
            }
        }
        Ok(())
    }

    /// Visits a value at the path `at`, and what is attached to it if it is a tensor, to which tensors may be attached, and so on.
    fn meet(&mut self, value: Ref, at: u32) -> Result<(), ParseError> {
        let mut attached = vec![value];
        while let Some(value) = attached.pop() {
            let Some(node) = value.node() else { continue };
            let first_met = self.seen.get_mut(node as usize).is_some_and(|seen| !std::mem::replace(seen, true));
            let tensor = match self.pickle.value(value) {
                Value::Object(object) => self.tensor(object, first_met)?,
                _ => None,
            };
            match tensor {
                Some(mut tensor) => {
                    // Its arguments are handled; its other values may contain tensors, too.
                    attached.extend(std::mem::take(&mut tensor.attached).into_iter().rev());
                    self.found(tensor, at)?;
                }
                None => self.to_visit.extend(first_met.then_some((value, at))),
            }
        }
        Ok(())
    }

    /// Visits a value one step below the path `above`.
    fn meet_below(&mut self, value: Ref, above: u32, part: PathPart) -> Result<(), ParseError> {
        let looked_into = match self.pickle.value(value) {
            Value::Sequence(members) | Value::Dict(members) => !members.is_empty(),
            Value::Object(_) | Value::Persistent(_) => true,
            _ => false,
        };
        if !looked_into {
            return Ok(());
        }
        let depth = self.steps.get(above as usize).map_or(0, |step| step.depth) + 1;
        if depth > DEPTH_MAX {
            return Err(ParseError::TooDeep);
        }
        let at = u32::try_from(self.steps.len()).map_err(|_| ParseError::TooMany)?;
        self.steps.push(Step { above, depth, part });
        let waiting = self.to_visit.len();
        let found = self.contents.tensors.len();
        self.meet(value, at)?;
        if self.to_visit.len() == waiting && self.contents.tensors.len() == found {
            // Visited before: the step is not needed.
            self.steps.pop();
        }
        Ok(())
    }

    fn visit(&mut self, value: Ref, at: u32) -> Result<(), ParseError> {
        match self.pickle.value(value) {
            Value::Sequence(members) => {
                for (place, &member) in members.iter().enumerate() {
                    self.meet_below(member, at, PathPart::Place(place))?;
                }
            }
            Value::Dict(members) => {
                for (place, pair) in members.chunks_exact(2).enumerate() {
                    let part = match self.pickle.value(pair[0]) {
                        Value::Text(_) | Value::Int(_) => PathPart::Key(pair[0]),
                        _ => PathPart::Place(place),
                    };
                    self.meet_below(pair[1], at, part)?;
                }
            }
            Value::Object(object) => {
                // Attributes and members are named by their keys, arguments by their positions.
                for part in [object.state, object.items, object.args] {
                    self.meet(part, at)?;
                }
            }
            Value::Persistent(of) => drop(self.storage(of)?),
            Value::Inert | Value::Int(_) | Value::Text(_) | Value::Global { .. } => {}
        }
        Ok(())
    }

    fn found(&mut self, tensor: UnnamedTensor, at: u32) -> Result<(), ParseError> {
        let name = self.name(at)?;
        self.names_len += name.len();
        if self.contents.tensors.len() == TENSORS_MAX || self.names_len > NAMES_LEN_MAX {
            return Err(ParseError::TooMany);
        }
        let UnnamedTensor { storage, dtype, shape, offset, row_major, .. } = tensor;
        // The name is kept twice, while equal ones are looked for.
        let weight =
            size_of::<(TensorRecord, Tensor, Elements, Step, String)>() + 2 * name.len() + size_of_val(&*shape);
        if !(self.reserve)(weight as u64) {
            return Err(ParseError::Memory);
        }
        self.contents.tensors.push(TensorRecord { name, storage, dtype, shape, offset, row_major });
        Ok(())
    }

    /// The path `at`, separated by dots.
    fn name(&self, mut at: u32) -> Result<String, ParseError> {
        if at == 0 {
            return Ok(ROOT_NAME.to_owned());
        }
        let (mut parts, mut len) = (Vec::new(), 0);
        while at != 0 {
            let Some(step) = self.steps.get(at as usize) else { break };
            let part = match step.part {
                PathPart::Place(place) => place.to_string().into(),
                PathPart::Key(key) => match self.pickle.value(key) {
                    Value::Text(text) => std::borrow::Cow::Borrowed(text),
                    Value::Int(int) => int.to_string().into(),
                    _ => "".into(),
                },
            };
            len += part.len() + 1;
            if len > TENSOR_NAME_MAX {
                return Err(ParseError::TooMany);
            }
            parts.push(part);
            at = step.above;
        }
        parts.reverse();
        Ok(parts.join("."))
    }

    /// Tensor of an object; none if the object is no tensor, or has an unknown form. Its attached values only if `with_attached`: a
    /// pickle can refer to an object with very many of them very often.
    fn tensor(&mut self, mut object: Object, with_attached: bool) -> Result<Option<UnnamedTensor>, ParseError> {
        let mut attached = Vec::new();
        for _ in 0..WRAPS_MAX {
            let Value::Global { module: "torch._utils" | "torch._tensor", name } = self.pickle.value(object.class)
            else {
                return Ok(None);
            };
            let Some(args) = self.pickle.sequence(object.args) else { return Ok(None) };
            attached.push(object.state);
            let view = match (name, args) {
                ("_rebuild_tensor" | "_rebuild_tensor_v2", &[storage, offset, size, stride, ..]) => {
                    self.view(storage, offset, [size, stride], None)?
                }
                ("_rebuild_qtensor", &[storage, offset, size, stride, quantizer, ..]) => {
                    attached.push(quantizer);
                    self.view(storage, offset, [size, stride], None)?
                }
                ("_rebuild_tensor_v3", &[storage, offset, size, stride, _, _, dtype, ..]) => {
                    self.view(storage, offset, [size, stride], Some(dtype))?
                }
                ("_rebuild_from_type_v2", &[class, _, args, state]) => {
                    attached.push(state);
                    object = Object { class, args, ..object };
                    continue;
                }
                ("_rebuild_parameter" | "_rebuild_parameter_with_state", &[data, _, _, ref state @ ..]) => {
                    if with_attached {
                        attached.extend(state);
                    }
                    let Value::Object(inner) = self.pickle.value(data) else { return Ok(None) };
                    object = inner;
                    continue;
                }
                ("_rebuild_device_tensor_from_cpu_tensor", &[data, ..]) => {
                    let Value::Object(inner) = self.pickle.value(data) else { return Ok(None) };
                    object = inner;
                    continue;
                }
                _ => None,
            };
            attached.retain(|value| with_attached && value.node().is_some());
            return Ok(view.map(|view| UnnamedTensor { attached, ..view }));
        }
        Ok(None)
    }

    fn view(
        &mut self,
        storage: Ref,
        offset: Ref,
        [size, stride]: [Ref; 2],
        dtype: Option<Ref>,
    ) -> Result<Option<UnnamedTensor>, ParseError> {
        let Value::Persistent(of) = self.pickle.value(storage) else { return Ok(None) };
        let numbers = (self.pickle.number(offset), self.numbers(size), self.numbers(stride));
        let (Some(offset), Some(shape), Some(strides)) = numbers else { return Ok(None) };
        let Some(storage) = self.storage(of)? else { return Ok(None) };
        let Some(stored) = self.contents.storages.get_mut(storage) else { return Ok(None) };
        let dtype = match dtype {
            None => stored.dtype.clone(),
            Some(dtype) => {
                let known = match self.pickle.value(dtype) {
                    Value::Global { module: "torch", name } => dtypes::by_name(name),
                    _ => None,
                };
                // The storage class only says bytes: the first tensor determines the type.
                if stored.elements == Some(Dtype::U8) && known.is_some() {
                    stored.elements.clone_from(&known);
                }
                known
            }
        };
        let row_major = is_row_major(&shape, &strides);
        Ok(Some(UnnamedTensor { storage, dtype, shape, offset, row_major, attached: Vec::new() }))
    }

    /// A size or strides: a tuple of numbers.
    fn numbers(&self, value: Ref) -> Option<Box<[u64]>> {
        let members = self.pickle.sequence(value).filter(|members| members.len() <= RANK_MAX)?;
        members.iter().map(|&member| self.pickle.number(member)).collect()
    }

    /// Storage of a persistent id: `("storage", class, key, location, elements)`.
    fn storage(&mut self, of: Ref) -> Result<Option<usize>, ParseError> {
        let Some(&[kind, class, key, _, elements]) = self.pickle.sequence(of) else { return Ok(None) };
        let described = (self.pickle.text(kind), self.pickle.text(key), self.pickle.number(elements));
        let (Some("storage"), Some(key), Some(elements)) = described else { return Ok(None) };
        if key.len() > KEY_LEN_MAX {
            return Ok(None);
        }
        let dtype = match self.pickle.value(class) {
            Value::Global { module: "torch" | "torch.storage", name } => dtypes::by_storage(name),
            _ => None,
        };
        let refuse = |what| ParseError::Storage { key: key.to_owned(), what };
        let len = match &dtype {
            Some(dtype) => Some(dtype.tensor_len(&[elements]).ok_or_else(|| refuse("is longer than any file"))?),
            None => None,
        };
        if let Some(&known) = self.keys.get(key) {
            let same = self.contents.storages.get(known).is_some_and(|stored| stored.len == len);
            return if same { Ok(Some(known)) } else { Err(refuse("is described in two ways")) };
        }
        let known = self.contents.storages.len();
        self.contents.storages.push(Stored { key, len, elements: dtype.clone(), dtype });
        self.keys.insert(key, known);
        Ok(Some(known))
    }
}

/// A [`TensorRecord`] without its name.
struct UnnamedTensor {
    storage: usize,
    dtype: Option<Dtype>,
    shape: Box<[u64]>,
    offset: u64,
    row_major: bool,
    /// Attached values: the tensor's attributes, what quantised it.
    attached: Vec<Ref>,
}

/// True if the elements are contiguous and row-major. Strides of dimensions of length one do not matter.
fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    if shape.len() != strides.len() {
        return false;
    }
    if shape.contains(&0) {
        return true;
    }
    let mut step = 1_u64;
    shape.iter().zip(strides).rev().all(|(&dim, &stride)| {
        let fits = dim == 1 || stride == step;
        step = step.saturating_mul(dim);
        fits
    })
}
