//! Specification of a node, as words: `far,rate=300M,up.delay=25ms,up.loss=0.1%`.

use crate::lane::Shape;

/// Packets that a queue holds at least, whatever the product of rate and delay.
const QUEUE_PACKETS_MIN: u64 = 64;

/// One node of the star.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// From the node to the middle.
    pub(crate) up: ShapeSpec,
    /// From the middle to the node.
    pub(crate) down: ShapeSpec,
}

/// A shape whose queue may be left to the link.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ShapeSpec {
    rate: u64,
    delay: u64,
    loss: f64,
    queue: Option<u64>,
}

impl ShapeSpec {
    /// The shape, with a queue of one bandwidth-delay product where none was asked for.
    fn shape(self, round_trip: u64, mtu: u64) -> Shape {
        let product = u128::from(self.rate) * u128::from(round_trip) / 8_000_000_000;
        let product = u64::try_from(product).unwrap_or(u64::MAX).max(QUEUE_PACKETS_MIN * mtu);
        let queue = self.queue.unwrap_or(if self.rate == 0 { u64::MAX } else { product });
        Shape { rate: self.rate, delay: self.delay, loss: self.loss, queue }
    }
}

impl Node {
    /// Reads a node: its name, then settings `[up.|down.]rate|delay|loss|queue=VALUE`; without up or down they are of both.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let name = words.next().unwrap_or_default().to_owned();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            return Err(format!("{text:?}: a node begins with its name, of letters, digits and dashes"));
        }
        let mut node = Self { name, up: ShapeSpec::default(), down: ShapeSpec::default() };
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("{word:?} is no setting: KEY=VALUE"))?;
            match key.split_once('.') {
                Some(("up", key)) => set(&mut node.up, key, value)?,
                Some(("down", key)) => set(&mut node.down, key, value)?,
                _ => {
                    set(&mut node.up, key, value)?;
                    set(&mut node.down, key, value)?;
                }
            }
        }
        Ok(node)
    }

    fn round_trip(&self) -> u64 {
        self.up.delay + self.down.delay
    }
}

/// The shapes of each node, up and down. A queue that was not asked for is one bandwidth-delay product of the way to the
/// node that is farthest and back.
pub(crate) fn shapes(nodes: &[Node], mtu: u64) -> Vec<(Shape, Shape)> {
    let farthest = |from: usize| {
        let others = nodes.iter().enumerate().filter(|(at, _)| *at != from);
        others.map(|(_, node)| node.round_trip()).max().unwrap_or(0)
    };
    let both = |(at, node): (usize, &Node)| {
        let round_trip = node.round_trip() + farthest(at);
        (node.up.shape(round_trip, mtu), node.down.shape(round_trip, mtu))
    };
    nodes.iter().enumerate().map(both).collect()
}

fn set(asked: &mut ShapeSpec, key: &str, value: &str) -> Result<(), String> {
    let bad = || format!("{key}={value}: rate=300M (bits a second), delay=25ms, loss=0.1%, queue=1M (bytes)");
    match key {
        "rate" => asked.rate = whole(number(value, &[("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0)]).ok_or_else(bad)?),
        "delay" => asked.delay = whole(number(value, &[("us", 1e3), ("ms", 1e6), ("s", 1e9)]).ok_or_else(bad)?),
        "loss" => asked.loss = number(value, &[("%", 0.01), ("", 1.0)]).filter(|l| *l <= 1.0).ok_or_else(bad)?,
        "queue" => asked.queue = Some(whole(number(value, &[("M", 1e6), ("K", 1e3), ("", 1.0)]).ok_or_else(bad)?)),
        _ => return Err(format!("{key} is no setting of a link: rate, delay, loss, queue")),
    }
    Ok(())
}

/// A number that is not negative, times what its unit stands for.
fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (digits, times) = units.iter().find_map(|(unit, times)| Some((text.strip_suffix(unit)?, times)))?;
    digits.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0).map(|n: f64| n * times)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`number` is not negative; it saturates")]
const fn whole(number: f64) -> u64 {
    number as u64
}
