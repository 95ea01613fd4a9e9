//! Byte planes: bytes of the same significance of all numbers form a plane, and each plane is stored in the best encoding.
//!
//! The numbers of a tensor have similar exponents, but nearly random low bits. As separate planes, the exponents shrink to a
//! third, and the rest is copied.
//!
//! ```text
//! kind (1):   log2 of the width in bytes; bit 2: numbers were rotated left by one bit, so that the sign is the lowest bit
//! planes:     one for each byte of a number, the least significant first: how (1), stored length (u32, little-endian)
//! bodies:     of the planes, one after another
//! rest:       plain bytes after the last complete number
//! ```
//!
//! Encodings: 0 raw; 1 one repeated byte; 2 Huffman-coded; 3 in groups; 4 by classes of numbers, in differences only.

mod classed;
mod count;
mod flat;
mod grouped;
mod split;

use std::cell::RefCell;
use std::ops::Range;

pub(super) use self::classed::{CLASSES, Classes};
use self::count::counts;
use self::flat::Flat;
use self::grouped::Level;
use super::scratch;

/// Kind of the numbers of a tensor, with their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Floats of so many bytes: sign, exponent, mantissa.
    Float(Width),
    /// Integers of so many bytes.
    Integer(Width),
}

impl Element {
    /// Bytes in one.
    #[must_use]
    pub const fn width(self) -> Width {
        match self {
            Self::Float(width) | Self::Integer(width) => width,
        }
    }
}

/// Bytes in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Width {
    /// One.
    W1 = 0,
    /// Two.
    W2 = 1,
    /// Four.
    W4 = 2,
    /// Eight.
    W8 = 3,
}

impl Width {
    /// The width of `bytes` bytes.
    #[must_use]
    pub const fn of(bytes: u32) -> Option<Self> {
        match bytes {
            1 => Some(Self::W1),
            2 => Some(Self::W2),
            4 => Some(Self::W4),
            8 => Some(Self::W8),
            _ => None,
        }
    }

    /// Width in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        1 << self as u8
    }
}

/// Bit in the first byte that marks rotated numbers.
const ROTATED: u8 = 4;
/// Bytes of the header of one plane.
const PLANE_HEADER: usize = 5;
/// Minimum saving, relative to the plane, for which it is coded.
const GAIN: usize = 64;
/// Bytes in a sample that decides whether to count a plane, and the number of places.
const SAMPLES: usize = 8;
const SAMPLE: usize = 512;
/// Minimum length of a plane for groups, which need a second table.
const GROUPED_FROM: usize = 1 << 10;
/// Mark of a plane in groups, beside those of [`Flat`].
const GROUPED: u8 = 3;
/// Mark of a plane in classes.
const CLASSED: u8 = 4;
/// Maximum share of the most frequent byte of a plane for which classes are tried.
const CLASSED_BELOW: f64 = 0.6;

thread_local! {
    /// The planes of a chunk.
    static PLANES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Encodes `plain` as numbers of `element`; none unless that is shorter than `limit` bytes.
#[must_use]
pub fn encode(plain: &[u8], element: Element, limit: usize) -> Option<Vec<u8>> {
    let (width, rotate) = (element.width(), is_rotated(element));
    let (numbers, rest) = plain.split_at_checked(plain.len() / width.bytes() * width.bytes())?;
    let head = [width as u8 | if rotate { ROTATED } else { 0 }];
    write(&head, Numbers { bytes: numbers, width, rotate, classes: None }, rest, limit)
}

/// Length of the output of [`encode`], up to four bytes for each plane; none if it has none of any length.
#[must_use]
pub fn encoded_len(plain: &[u8], element: Element) -> Option<usize> {
    let width = element.width();
    let (numbers, rest) = plain.split_at_checked(plain.len() / width.bytes() * width.bytes())?;
    let count = numbers.len() / width.bytes();
    scratch::with(&PLANES, numbers.len(), |planes| {
        split::split(numbers, width, is_rotated(element), planes);
        let lens = planes.chunks_exact(count.max(1)).map(plane_len);
        Some(1 + width.bytes() * PLANE_HEADER + lens.sum::<usize>() + rest.len())
    })
}

/// Decodes the output of [`encode`] for `plain.len()` bytes; none if `stored` is invalid.
pub fn decode(stored: &[u8], plain: &mut [u8]) -> Option<()> {
    let (&first, stored) = stored.split_first()?;
    read(stored, kind(first)?, None, plain)
}

/// Where the planes lie in an output of [`encode`], for decoders elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Width of the numbers.
    pub width: Width,
    /// True if they were rotated.
    pub rotated: bool,
    /// Encoding and range of each plane, the least significant first.
    pub planes: Vec<(Encoding, Range<usize>)>,
    /// First byte after the planes; the bytes from there on follow the last complete number.
    pub rest: usize,
}

/// Encodings of a plane that need no other planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// A byte for each number.
    Raw,
    /// One byte, for all numbers.
    One,
    /// A Huffman code.
    Huffman,
}

impl Outline {
    /// Outline of `stored`, which decodes to `plain_len` bytes. None, if it is invalid, or a plane is in groups or classes.
    #[must_use]
    pub fn of(stored: &[u8], plain_len: usize) -> Option<Self> {
        let (width, rotated) = kind(*stored.first()?)?;
        let numbers = plain_len / width.bytes();
        let mut at = 1 + width.bytes() * PLANE_HEADER;
        let headers = stored.get(1..at)?;
        let mut planes = Vec::with_capacity(width.bytes());
        for header in headers.chunks_exact(PLANE_HEADER) {
            let (&how, len) = header.split_first()?;
            let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
            let end = at.checked_add(len).filter(|&end| end <= stored.len())?;
            let encoding = match Flat::of(how)? {
                Flat::Raw if len == numbers => Encoding::Raw,
                Flat::One if len == 1 => Encoding::One,
                Flat::Huffman => Encoding::Huffman,
                Flat::Raw | Flat::One => return None,
            };
            planes.push((encoding, at..end));
            at = end;
        }
        (stored.len() - at == plain_len % width.bytes()).then_some(Self { width, rotated, planes, rest: at })
    }
}

/// Width and rotation of the numbers by the first byte of a frame.
fn kind(byte: u8) -> Option<(Width, bool)> {
    let (width, rotated) = (Width::of(1 << (byte & 3))?, byte & ROTATED != 0);
    (byte & !(3 | ROTATED) == 0 && !(rotated && width == Width::W1)).then_some((width, rotated))
}

/// True if numbers of `element` are rotated. Single bytes have sign and exponent in the same byte anyway.
fn is_rotated(element: Element) -> bool {
    matches!(element, Element::Float(width) if width != Width::W1)
}

/// Numbers to split into planes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: Width,
    /// True if the numbers are rotated first.
    pub(super) rotate: bool,
    /// Class of each number, if known.
    pub(super) classes: Option<&'a Classes<'a>>,
}

/// The bytes `head`, the planes of `numbers`, and the `rest`; none unless that is shorter than `limit` bytes.
pub(super) fn write(head: &[u8], numbers: Numbers<'_>, rest: &[u8], limit: usize) -> Option<Vec<u8>> {
    let Numbers { bytes: numbers, width, rotate, classes } = numbers;
    let (count, bytes) = (numbers.len() / width.bytes(), width.bytes());
    scratch::with(&PLANES, numbers.len(), |planes| {
        split::split(numbers, width, rotate, planes);
        let mut out = Vec::with_capacity(limit.min(numbers.len()) + 64);
        out.extend_from_slice(head);
        out.resize(head.len() + bytes * PLANE_HEADER, 0);
        for (number, plane) in planes.chunks_exact(count.max(1)).enumerate() {
            let start = out.len();
            let how = encode_plane(plane, classes, &mut out);
            let len = u32::try_from(out.len() - start).ok()?;
            let header = out.get_mut(head.len() + number * PLANE_HEADER..)?;
            header.first_chunk_mut::<1>()?[0] = how;
            header.get_mut(1..PLANE_HEADER)?.copy_from_slice(&len.to_le_bytes());
        }
        out.extend_from_slice(rest);
        (out.len() < limit).then_some(out)
    })
}

/// Decodes the output of [`write()`] after its head.
pub(super) fn read(
    stored: &[u8],
    (width, rotated): (Width, bool),
    classes: Option<&Classes<'_>>,
    plain: &mut [u8],
) -> Option<()> {
    let (headers, mut bodies) = stored.split_at_checked(width.bytes() * PLANE_HEADER)?;
    let count = plain.len() / width.bytes();
    let (numbers, rest) = plain.split_at_mut(count * width.bytes());
    scratch::with(&PLANES, numbers.len(), |planes| {
        let mut sources: [&[u8]; 8] = [&[]; 8];
        let mut free = planes;
        for (header, source) in headers.chunks_exact(PLANE_HEADER).zip(&mut sources) {
            let (&how, len) = header.split_first()?;
            let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
            let (body, after) = bodies.split_at_checked(len)?;
            bodies = after;
            *source = if how == Flat::Raw as u8 {
                (len == count).then_some(body)?
            } else {
                let (plane, others) = free.split_at_mut_checked(count)?;
                free = others;
                decode_plane(how, body, classes, plane)?;
                plane
            };
        }
        split::merge(&sources, width, rotated, numbers);
        (bodies.len() == rest.len()).then(|| rest.copy_from_slice(bodies))
    })
}

/// Approximate bits of the planes of `numbers`, by the counts of their bytes.
pub(super) fn estimate(numbers: &[u8], width: Width, rotate: bool) -> f64 {
    let count = numbers.len() / width.bytes();
    let mut planes = vec![0; numbers.len()];
    split::split(numbers, width, rotate && width != Width::W1, &mut planes);
    planes.chunks_exact(count.max(1)).map(|plane| entropy(&counts(plane), count)).sum()
}

/// Entropy of `total` bytes with these counts, in bits.
fn entropy(counts: &[u32; 256], total: usize) -> f64 {
    let occurring = counts.iter().filter(|&&count| count > 0);
    occurring.map(|&count| f64::from(count) * (total as f64 / f64::from(count)).log2()).sum()
}

/// Appends one plane in the best encoding, and returns that.
fn encode_plane(plane: &[u8], classes: Option<&Classes<'_>>, out: &mut Vec<u8>) -> u8 {
    let sample = Sample::of(plane);
    if !sample.may_gain() {
        out.extend_from_slice(plane);
        return Flat::Raw as u8;
    }
    let mut seen = [0; 256];
    match classes.filter(|_| sample.most < CLASSED_BELOW) {
        Some(classes) if classed::encode(plane, classes, &mut seen, out) => return CLASSED,
        Some(_) => {}
        None => seen = counts(plane),
    }
    let counts = seen;
    match grouped::worth(&counts, plane.len()) {
        Some(log) => {
            grouped::encode(plane, &counts, log, Level::Plane, out);
            GROUPED
        }
        None => Flat::encode(plane, &counts, out) as u8,
    }
}

/// Bytes that [`encode_plane`] appends without classes, up to four.
fn plane_len(plane: &[u8]) -> usize {
    if !Sample::of(plane).may_gain() {
        return plane.len();
    }
    let counts = counts(plane);
    match grouped::worth(&counts, plane.len()) {
        Some(log) => {
            let mut out = Vec::new();
            grouped::encode(plane, &counts, log, Level::Plane, &mut out);
            out.len()
        }
        None => Flat::len(&counts, plane.len()),
    }
}

fn decode_plane(how: u8, body: &[u8], classes: Option<&Classes<'_>>, plane: &mut [u8]) -> Option<()> {
    match how {
        GROUPED => grouped::decode(body, Level::Plane, plane),
        CLASSED => classed::decode(body, classes?, plane),
        _ => Flat::of(how)?.decode(body, plane),
    }
}

/// Sample of a plane.
struct Sample {
    /// Entropy per byte, in bits.
    bits: f64,
    /// Share of the most frequent byte.
    most: f64,
}

impl Sample {
    fn of(plane: &[u8]) -> Self {
        let mut seen = [0u32; 256];
        let mut total = 0;
        let step = plane.len().saturating_sub(SAMPLE) / (SAMPLES - 1);
        let places = (0..SAMPLES).map(|at| at * step..at * step + SAMPLE);
        let all = 0..plane.len();
        let (places, whole) = if plane.len() <= SAMPLES * SAMPLE { (None, Some(all)) } else { (Some(places), None) };
        for place in places.into_iter().flatten().chain(whole) {
            let sample = plane.get(place).unwrap_or_default();
            sample.iter().for_each(|&byte| seen[usize::from(byte)] += 1);
            total += sample.len();
        }
        let most = seen.iter().copied().max().unwrap_or(0);
        let of_all = total.max(1) as f64;
        Self { bits: entropy(&seen, total) / of_all, most: f64::from(most) / of_all }
    }

    /// True if the plane may be compressible. Planes of low bits usually are not, and then are not counted.
    fn may_gain(&self) -> bool {
        self.most > 0.0 && self.bits < 8.0 - 8.0 / GAIN as f64
    }
}

#[cfg(test)]
mod tests;
