//! Schedules of the real log: all with few switches, and many at random.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures::stream::{self, FuturesUnordered};
use futures::{FutureExt as _, StreamExt as _};

use super::schedule::Operation::{self, AddSegment, Fence, Join, Look, Open, Remove, Renew, Save, Set, Truncate};
use super::schedule::{Chance, Choose, RunReport, run};

/// Runs at once: they wait for the log's pauses together.
const TOGETHER: usize = 256;

/// Follows a plan, then the first chance; notes what else it could have done.
#[derive(Debug)]
struct Planned {
    plan: Vec<usize>,
    at: usize,
    /// Switches and faults so far.
    spent: (u32, u32),
    limit: (u32, u32),
    others: Vec<Vec<usize>>,
}

impl Choose for Planned {
    fn choose(&mut self, chances: &[Chance]) -> usize {
        assert_eq!((chances[0].switches, chances[0].faults), (0, 0), "going on costs nothing");
        let affords = |chance: &Chance| {
            self.spent.0 + chance.switches <= self.limit.0 && self.spent.1 + chance.faults <= self.limit.1
        };
        let chosen = match self.plan.get(self.at) {
            Some(&chosen) => chosen,
            None => {
                let others = (1..chances.len()).filter(|&n| affords(&chances[n]));
                self.others.extend(others.map(|n| [&self.plan[..], &[n]].concat()));
                self.plan.push(0);
                0
            }
        };
        self.at += 1;
        self.spent.0 += chances[chosen].switches;
        self.spent.1 += chances[chosen].faults;
        chosen
    }
}

/// Chooses by a seed: mostly goes on, sometimes switches, seldom fails.
#[derive(Debug)]
struct Seeded {
    state: u64,
    faults: u32,
    /// One chance in so many to switch: long stretches let somebody fall far behind.
    patience: usize,
}

impl Seeded {
    /// `SplitMix64`.
    fn below(&mut self, end: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(end).unwrap()).unwrap()
    }
}

impl Choose for Seeded {
    fn choose(&mut self, chances: &[Chance]) -> usize {
        let faulty = self.faults > 0 && self.below(12) == 0;
        let fits = |chance: &Chance| (chance.faults > 0) == faulty;
        let fitting: Vec<usize> = (0..chances.len()).filter(|&n| fits(&chances[n])).collect();
        if fitting.is_empty() || (!faulty && self.below(self.patience) > 0) {
            return 0;
        }
        self.faults -= u32::from(faulty);
        fitting[self.below(fitting.len())]
    }
}

/// Follows directions: lets an actor go on until it wants to send a request or is done, or lets one request through.
#[derive(Debug)]
struct Directed(VecDeque<Direction>);

#[derive(Clone, Copy, Debug)]
enum Direction {
    Until(usize, &'static str),
    Pick(usize, &'static str),
    Finish(usize),
}

impl Choose for Directed {
    fn choose(&mut self, chances: &[Chance]) -> usize {
        let find = |who: usize, text: &str| {
            chances.iter().position(|chance| chance.request_of(who).is_some_and(|shown| shown.ends_with(text)))
        };
        while let Some(&direction) = self.0.front() {
            match direction {
                Direction::Until(who, text) if find(who, text).is_none() => {
                    return find(who, "").unwrap_or_else(|| panic!("actor {who} never sends {text}"));
                }
                Direction::Finish(who) if find(who, "").is_some() => return find(who, "").unwrap(),
                Direction::Until(..) | Direction::Finish(_) => drop(self.0.pop_front()),
                Direction::Pick(who, text) => {
                    self.0.pop_front();
                    return find(who, text).unwrap_or_else(|| panic!("actor {who} does not send {text}"));
                }
            }
        }
        0
    }
}

/// A few actors, after a past that nothing disturbs.
#[derive(Clone, Copy, Debug)]
struct Cast {
    past: &'static [Operation],
    actors: &'static [&'static [Operation]],
}

const WRITERS: Cast = Cast { past: &[Set("a")], actors: &[&[Set("z"), Remove("z")], &[Set("z")], &[Truncate(0)]] };
const SESSIONS: Cast =
    Cast { past: &[Open], actors: &[&[AddSegment, Save("z")], &[Set("y"), Set("z")], &[Truncate(0)]] };
const SHARED: Cast = Cast { past: &[Open], actors: &[&[Renew], &[Join(0)], &[Truncate(0), Truncate(0)]] };
const FENCED: Cast = Cast { past: &[Open], actors: &[&[Save("z")], &[Fence(0), Set("z")], &[Truncate(0)]] };
const TRUNCATIONS: Cast = Cast { past: &[Set("a")], actors: &[&[Set("c")], &[Truncate(1), Look], &[Truncate(0)]] };
const READERS: Cast =
    Cast { past: &[Set("a")], actors: &[&[Set("z"), Remove("z")], &[Set("y")], &[Truncate(0)], &[Look, Look]] };
/// Small enough for every schedule with few switches.
const SMALL: [(&str, Cast); 5] = [
    ("writers", WRITERS),
    ("sessions", SESSIONS),
    ("shared", SHARED),
    ("fenced", FENCED),
    ("truncations", TRUNCATIONS),
];

impl Cast {
    async fn run(self, chooser: &mut impl Choose) -> Result<RunReport, String> {
        let actors: Vec<Vec<Operation>> = self.actors.iter().map(|deeds| deeds.to_vec()).collect();
        let run = AssertUnwindSafe(tokio::task::unconstrained(run(self.past, &actors, chooser)));
        run.catch_unwind().await.map_err(|panic| match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => panic.downcast::<&str>().map_or_else(|_| "panic".to_owned(), |text| (*text).to_owned()),
        })
    }

    async fn planned(self, plan: Vec<usize>, limit: (u32, u32)) -> (Result<RunReport, String>, Planned) {
        let mut chooser = Planned { plan, at: 0, spent: (0, 0), limit, others: vec![] };
        (self.run(&mut chooser).await, chooser)
    }

    async fn seeded(self, seed: u64) -> Result<RunReport, String> {
        let (faults, patience) =
            (u32::try_from(seed % 4).unwrap(), [4, 8, 16, 32][usize::try_from(seed / 4 % 4).unwrap()]);
        let mut chooser = Seeded { state: seed, faults, patience };
        self.run(&mut chooser).await
    }
}

/// Every schedule of a cast within the limit of switches and faults.
async fn all(title: &str, cast: Cast, limit: (u32, u32)) {
    let mut waiting = VecDeque::from([vec![]]);
    let mut running = FuturesUnordered::new();
    let (mut runs, mut strays, mut unknown) = (0u32, 0, 0);
    let began = Instant::now();
    loop {
        while running.len() < TOGETHER
            && let Some(plan) = waiting.pop_back()
        {
            running.push(cast.planned(plan, limit));
        }
        let Some((result, chooser)) = running.next().await else { break };
        let story = result.unwrap_or_else(|rule| panic!("{title}: {rule}\nplan: {:?}", chooser.plan));
        runs += 1;
        (strays, unknown) = (strays + story.strays, unknown + story.unknown);
        waiting.extend(chooser.others);
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{title}: {runs} schedules within {limit:?} switches and faults in {seconds:.1} s");
    println!("{title}: {strays} strays, {unknown} unknown fates");
}

fn on_one_thread(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work);
}

/// A reader is about to read entry 2 when that and entry 3 are cut away. What it then finds as 2 is a stray, and 3, still
/// there, does not follow from it: the reader starts over, and calls nothing damaged.
#[test]
fn a_stray_is_not_taken_for_damage() {
    use Direction::{Finish, Pick, Until};
    let look = [
        Pick(3, "get boundary/00000000000000000001"),
        Until(3, "get log/00000000000000000001"),
        Until(3, "get boundary/00000000000000000001"),
        Pick(3, "get boundary/00000000000000000001"),
    ];
    let look_again = [Until(3, "get log/00000000000000000002")];
    let meanwhile = [
        Until(1, "create log/00000000000000000002"),
        Finish(0),
        Until(2, "delete log/00000000000000000002"),
        Pick(2, "delete log/00000000000000000002"),
        Pick(1, "create log/00000000000000000002"),
    ];
    let read_on = [
        Pick(3, "get log/00000000000000000002"),
        Until(3, "get log/00000000000000000003"),
        Pick(3, "get log/00000000000000000003"),
    ];
    let directions = [&look[..], &look_again, &meanwhile, &read_on].concat();
    on_one_thread(async {
        let story = READERS.run(&mut Directed(VecDeque::from(directions))).await.unwrap();
        assert_eq!(story.strays, 1, "{}", story.lines.join("\n"));
    });
}

#[test]
fn schedules_with_two_switches() {
    on_one_thread(async {
        for (title, cast) in SMALL {
            all(title, cast, (2, 0)).await;
        }
    });
}

#[test]
fn schedules_with_a_switch_and_a_fault() {
    on_one_thread(async {
        for (title, cast) in SMALL {
            all(title, cast, (1, 1)).await;
        }
    });
}

/// `SIM_SEED=17 cargo test --test sim random -- --nocapture` runs one seed of every cast and tells its story.
#[test]
fn random_schedules() {
    let one = std::env::var("SIM_SEED").ok().map(|seed| seed.parse::<u64>().expect("SIM_SEED is a number"));
    let seeds = one.map_or(0..2000, |seed| seed..seed + 1);
    on_one_thread(async {
        for (title, cast) in SMALL.into_iter().chain([("readers", READERS)]) {
            let runs = stream::iter(seeds.clone()).map(|seed| async move { (seed, cast.seeded(seed).await) });
            let (mut strays, mut unknown) = (0, 0);
            let mut runs = runs.buffer_unordered(TOGETHER);
            while let Some((seed, result)) = runs.next().await {
                let story = result.unwrap_or_else(|rule| panic!("{title}, SIM_SEED={seed}: {rule}"));
                (strays, unknown) = (strays + story.strays, unknown + story.unknown);
                if one.is_some() {
                    println!("{title}:\n  {}", story.lines.join("\n  "));
                }
            }
            println!("{title}: seeds {seeds:?}; {strays} strays, {unknown} unknown fates");
        }
    });
}
