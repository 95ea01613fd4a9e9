//! Bundles: pieces of a tensor of weights and of its optimizer's moments, at the same place, as one chunk.
//!
//! The optimizer computes the next weights from the weights, the moments and the gradient, which follows from the first moments of
//! two steps. So a bundle is stored as the first moments, and the errors of the predictions of the other members. Its plain bytes are
//! those of its members, one after another, each of the same length: weights, first moments and, for Adam, second moments, all
//! 32-bit floats.
//!
//! ```text
//! count (1):   members, 2 or 3
//! members:     one for each: how (1), stored length (u32, little-endian)
//! bodies:      of the members, one after another
//! ```
//!
//! How: 0 raw; 1 byte planes; 2 the difference to the member of the base; 3 and 4 the difference to a prediction, whose rule stands
//! before it ([`mod@predict`]): as [`difference`] stores it, or as one zstd frame of the zigzag-encoded differences.

mod fit;
mod predict;

use std::cell::RefCell;

use self::predict::{RULE_LEN, Rule, predict};
use super::{Element, LEVEL, Width, difference, planes, scratch};

/// Number of bundles in a row that are predicted, each from the one before.
pub const STEPS_MAX: u8 = 7;
/// Maximum length of a bundle: three pieces of a tensor.
pub const BUNDLE_LEN_MAX: u64 = 3 << 20;

/// Bytes of a member's number.
const NUMBER: usize = 4;
/// Bytes before the body of a member.
const MEMBER_HEAD: usize = 5;
const FLOAT: Element = Element::Float(Width::W4);
/// Share of its member (one part in this many) below which a prediction is not compared with other encodings.
const GOOD_ENOUGH: usize = 32;

const RAW: u8 = 0;
const PLANES: u8 = 1;
const DIFFERENCE: u8 = 2;
const PREDICTED: u8 = 3;
const PREDICTED_SPARSE: u8 = 4;

/// Members, in the order of their bytes.
const WEIGHTS: usize = 0;
const FIRST_MOMENTS: usize = 1;
const SECOND_MOMENTS: usize = 2;
/// Order of decoding: predictions need the members before them.
const ORDER: [usize; 3] = [FIRST_MOMENTS, SECOND_MOMENTS, WEIGHTS];

thread_local! {
    /// Predicted numbers of a member.
    static PREDICTIONS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// Their differences to the numbers.
    static DIFFERENCES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The members of a bundle.
#[derive(Clone, Copy, Debug)]
struct Members<'a> {
    weights: &'a [u8],
    first_moments: &'a [u8],
    second_moments: Option<&'a [u8]>,
}

impl<'a> Members<'a> {
    /// Splits the plain bytes of a bundle of `count` members; none if they have no equal length.
    fn of(plain: &'a [u8], count: usize) -> Option<Self> {
        let len = member_len(plain.len(), count)?;
        let mut members = plain.chunks_exact(len);
        let (weights, first_moments) = (members.next()?, members.next()?);
        Some(Self { weights, first_moments, second_moments: members.next() })
    }

    fn get(&self, member: usize) -> Option<&'a [u8]> {
        match member {
            WEIGHTS => Some(self.weights),
            FIRST_MOMENTS => Some(self.first_moments),
            _ => self.second_moments,
        }
    }
}

/// Bytes of each of `count` members of a bundle of `plain_len` bytes; none if there is no such bundle.
fn member_len(plain_len: usize, count: usize) -> Option<usize> {
    let fits = (2..=3).contains(&count) && plain_len > 0 && plain_len.is_multiple_of(count * NUMBER);
    fits.then(|| plain_len / count)
}

/// Encodes the bundle `plain` of `count` members, predicted from `base`, the bundle of the step before, if there is one; none if
/// it has no members of equal length, or `base` has another length.
pub(super) fn encode(plain: &[u8], count: usize, base: Option<&[u8]>) -> Option<Vec<u8>> {
    let now = Members::of(plain, count)?;
    let before = match base {
        Some(base) if base.len() != plain.len() => return None,
        Some(base) => Some(Members::of(base, count)?),
        None => None,
    };
    let bodies = (0..count).map(|member| encode_member(member, &now, before.as_ref())).collect::<Option<Vec<_>>>()?;
    let mut out = vec![u8::try_from(count).ok()?];
    for (how, body) in &bodies {
        out.push(*how);
        out.extend_from_slice(&u32::try_from(body.len()).ok()?.to_le_bytes());
    }
    bodies.iter().for_each(|(_, body)| out.extend_from_slice(body));
    Some(out)
}

/// Shortest encoding of a member so far.
struct Best<'a> {
    plain: &'a [u8],
    how: u8,
    /// None for the plain bytes.
    body: Option<Vec<u8>>,
}

impl Best<'_> {
    fn len(&self) -> usize {
        self.body.as_ref().map_or(self.plain.len(), Vec::len)
    }

    /// True if nothing else needs to be tried.
    fn is_good_enough(&self) -> bool {
        self.len() <= self.plain.len() / GOOD_ENOUGH
    }

    /// Keeps `body` if it is shorter.
    fn offer(&mut self, how: u8, body: Option<Vec<u8>>) {
        if body.as_ref().is_some_and(|body| body.len() < self.len()) {
            (self.how, self.body) = (how, body);
        }
    }
}

/// Encodes one member in the shortest way.
fn encode_member(member: usize, now: &Members<'_>, before: Option<&Members<'_>>) -> Option<(u8, Vec<u8>)> {
    let plain = now.get(member)?;
    let mut best = Best { plain, how: RAW, body: None };
    if let Some(before) = before {
        if let Some(rule) = fit::rule(member, now, before) {
            let predicted = encode_predicted(plain, &rule, now, before);
            best.offer(PREDICTED_SPARSE, predicted.sparse);
            best.offer(PREDICTED, predicted.planes);
        }
        if !best.is_good_enough() {
            best.offer(DIFFERENCE, difference::encode(plain, before.get(member)?, FLOAT));
        }
    }
    if !best.is_good_enough() {
        let least = best.len();
        best.offer(PLANES, planes::encode(plain, FLOAT, least));
    }
    Some((best.how, best.body.unwrap_or_else(|| plain.to_vec())))
}

/// A member as the difference to its prediction, in both ways; none of a way that saves nothing.
#[derive(Default)]
struct Predicted {
    sparse: Option<Vec<u8>>,
    planes: Option<Vec<u8>>,
}

fn encode_predicted(plain: &[u8], rule: &Rule, now: &Members<'_>, before: &Members<'_>) -> Predicted {
    scratch::with(&PREDICTIONS, plain.len(), |predictions| {
        if predict(rule, now, before, predictions).is_none() {
            return Predicted::default();
        }
        let sparse = scratch::with(&DIFFERENCES, plain.len(), |differences| {
            difference::subtract(plain, predictions, Width::W4, true, differences);
            zstd::bulk::compress(differences, LEVEL).ok()
        });
        let with_rule = |body: Vec<u8>| [&rule.to_bytes()[..], &body].concat();
        let sparse = sparse.map(with_rule);
        let is_good = sparse.as_ref().is_some_and(|sparse| sparse.len() <= plain.len() / GOOD_ENOUGH);
        let planes = (!is_good).then(|| difference::encode(plain, predictions, FLOAT).map(with_rule)).flatten();
        Predicted { sparse, planes }
    })
}

/// Decodes the output of [`encode`], which had this base, for `plain.len()` bytes; none if `stored` is invalid.
pub(super) fn decode(stored: &[u8], base: Option<&[u8]>, plain: &mut [u8]) -> Option<()> {
    let (&count, mut heads) = stored.split_first()?;
    let count = usize::from(count);
    let len = member_len(plain.len(), count)?;
    let before = match base {
        Some(base) if base.len() != plain.len() => return None,
        Some(base) => Some(Members::of(base, count)?),
        None => None,
    };
    let mut bodies: [(u8, &[u8]); 3] = [(RAW, &[]); 3];
    let mut rest = heads.split_at_checked(count * MEMBER_HEAD)?.1;
    for body in bodies.iter_mut().take(count) {
        let ([how, stored_len @ ..], others) = heads.split_first_chunk::<MEMBER_HEAD>()?;
        heads = others;
        let (own, others) = rest.split_at_checked(usize::try_from(u32::from_le_bytes(*stored_len)).ok()?)?;
        (*body, rest) = ((*how, own), others);
    }
    if !rest.is_empty() {
        return None;
    }
    let mut out = [&mut [] as &mut [u8], &mut [], &mut []];
    for (slot, member) in out.iter_mut().zip(plain.chunks_exact_mut(len)) {
        *slot = member;
    }
    for member in ORDER.into_iter().filter(|&member| member < count) {
        let (how, body) = bodies[member];
        let target = std::mem::take(&mut out[member]);
        decode_member(member, (how, body), &out, before.as_ref(), target)?;
        out[member] = target;
    }
    Some(())
}

/// Decodes one member to `target`; `decoded` holds those that were decoded before.
fn decode_member(
    member: usize,
    (how, body): (u8, &[u8]),
    decoded: &[&mut [u8]; 3],
    before: Option<&Members<'_>>,
    target: &mut [u8],
) -> Option<()> {
    match how {
        RAW if body.len() == target.len() => target.copy_from_slice(body),
        PLANES => planes::decode(body, target)?,
        DIFFERENCE => difference::decode(body, before?.get(member)?, target)?,
        PREDICTED | PREDICTED_SPARSE => {
            let (rule, body) = body.split_first_chunk::<RULE_LEN>()?;
            let rule = Rule::from_bytes(rule).filter(|rule| rule.member() == member)?;
            let second_moments = Some(&*decoded[SECOND_MOMENTS]).filter(|moments| !moments.is_empty());
            let now = Members { weights: &[], first_moments: &*decoded[FIRST_MOMENTS], second_moments };
            scratch::with(&PREDICTIONS, target.len(), |predictions| {
                predict(&rule, &now, before?, predictions)?;
                if how == PREDICTED {
                    return difference::decode(body, predictions, target);
                }
                let len = zstd::bulk::decompress_to_buffer(body, target).ok()?;
                (len == target.len()).then(|| difference::add(target, predictions, Width::W4, true))
            })?;
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
pub(crate) mod tests;
