//! The gate of isolation: every attack on every victim in a deterministic simulation of the
//! scheduler, fairness, and each defence switched off in turn.

mod neighbours_sim;

use std::sync::Arc;

use blockd_engine::schedule::{DEFAULT_WEIGHT, Defences, VolumeShare};
use neighbours_sim::{ClientSpec, Kind, MEMORY, Seen, World};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Microseconds that each case is warmed up and measured for.
const WARM_US: u64 = 100_000;
const MEASURE_US: u64 = 200_000;

const fn client(kind: Kind, depth: usize, bytes: u64) -> ClientSpec {
    ClientSpec { kind, depth, bytes, is_queue: false }
}

/// A neighbour that does harm where nothing holds it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Attack {
    /// As well-behaved as the victim.
    None,
    FullPool,
    /// Other connections to the victim's own volume.
    FullVolume,
    HalfWrites,
    UnreadReplies,
    LimitedWrites,
    LimitedReads,
    BlockStatus,
    ManyConnections,
    LongReads,
    LongWritesElsewhere,
    FullQueue,
}

const ATTACKS: [Attack; 11] = [
    Attack::FullPool,
    Attack::FullVolume,
    Attack::HalfWrites,
    Attack::UnreadReplies,
    Attack::LimitedWrites,
    Attack::LimitedReads,
    Attack::BlockStatus,
    Attack::ManyConnections,
    Attack::LongReads,
    Attack::LongWritesElsewhere,
    Attack::FullQueue,
];

/// The victims' loads, beside the attack and on another volume.
const VICTIMS: [(&str, ClientSpec); 6] = [
    ("read", client(Kind::Read, 1, 4 * KIB)),
    ("write", client(Kind::Write, 1, 4 * KIB)),
    ("flush", client(Kind::Flush, 1, 0)),
    ("deep read", client(Kind::Read, 32, 4 * KIB)),
    ("long read", client(Kind::Read, 8, 128 * KIB)),
    ("queue", ClientSpec { kind: Kind::Read, depth: 16, bytes: 4 * KIB, is_queue: true }),
];

/// The connections of an attacker, and whether its volume is limited and on another worker.
fn attackers(attack: Attack, victim: ClientSpec) -> (usize, ClientSpec) {
    match attack {
        Attack::None => (1, victim),
        Attack::FullPool | Attack::FullVolume => (20, client(Kind::FullPool, 128, 4 * KIB)),
        Attack::HalfWrites => (26, client(Kind::HalfWrite, 1, MIB)),
        Attack::UnreadReplies => (8, client(Kind::UnreadReplies, 128, MIB)),
        Attack::LimitedWrites => (4, client(Kind::Write, 64, 128 * KIB)),
        Attack::LimitedReads => (4, client(Kind::Read, 64, 128 * KIB)),
        Attack::BlockStatus => (8, client(Kind::BlockStatus, 64, 112 * KIB)),
        Attack::ManyConnections => (200, client(Kind::Read, 4, 4 * KIB)),
        Attack::LongReads => (8, client(Kind::Read, 32, 128 * KIB)),
        Attack::LongWritesElsewhere => (8, client(Kind::Write, 32, 128 * KIB)),
        Attack::FullQueue => {
            let queue = ClientSpec { is_queue: true, ..client(Kind::FullPool, 128, 4 * KIB) };
            (20, queue)
        }
    }
}

/// The service of a victim beside an attack. `late`: it connects when the attack has been going on.
fn run(attack: Attack, victim: ClientSpec, defences: Defences) -> Seen {
    let elsewhere = attack == Attack::LongWritesElsewhere;
    let mut world = World::new(if elsewhere { 2 } else { 1 }, defences);
    let pool = world.add_pool(true);
    // A full pool is another one, and the disk below it has nothing to do.
    let other = if matches!(attack, Attack::FullPool) { world.add_pool(true) } else { pool };
    let share = Arc::new(VolumeShare::default());
    let attacked = world.share_volume(usize::from(elsewhere), other, DEFAULT_WEIGHT, &share);
    if matches!(attack, Attack::LimitedWrites | Attack::LimitedReads) {
        world.limit(attacked, &share, 10 * MIB);
    }
    let (count, spec) = attackers(attack, victim);
    for _ in 0..count {
        world.add_client(attacked, spec);
    }
    world.run(WARM_US);
    let volume = match attack {
        Attack::FullVolume => attacked,
        _ => world.add_volume(0, pool, DEFAULT_WEIGHT),
    };
    let victim = world.add_client(volume, victim);
    world.run(WARM_US);
    world.forget();
    world.run(MEASURE_US);
    world.seen(victim)
}

/// Attacks that use the media queue as any volume may. A victim with one request at a time waits
/// for the queue that its neighbours are entitled to, which is bounded; a deep one gets its share.
const fn uses_media(attack: Attack) -> bool {
    matches!(attack, Attack::LongReads | Attack::LongWritesElsewhere | Attack::ManyConnections)
}

/// The violated expectation of a case, if any.
fn judge(attack: Attack, name: &str, got: Seen, beside_equal: Seen) -> Option<String> {
    let is_deep = name == "long read";
    let floor = match (uses_media(attack), is_deep) {
        (false, _) => 0.5,
        // Its share of the media is a half; the equal neighbour leaves it no more.
        (true, true) => 0.45,
        // Requests that the device has begun are ahead of each of its own, one of each worker.
        (true, false) => 0.05,
    };
    let ratio = got.bytes.max(got.done) as f64 / beside_equal.bytes.max(beside_equal.done) as f64;
    if ratio < floor {
        return Some(format!("{attack:?} x {name}: {ratio:.3} of an equal neighbour's"));
    }
    // A window of media, and a turn's quanta.
    let limit = beside_equal.worst_ns + 20_000_000;
    if got.worst_ns > limit {
        return Some(format!("{attack:?} x {name}: waited {} us", got.worst_ns / 1000));
    }
    None
}

/// All cases that go wrong, with a table of them.
fn matrix(defences: Defences) -> (Vec<String>, String) {
    let mut wrong = Vec::new();
    let mut table = String::new();
    for (name, victim) in VICTIMS {
        let equal = run(Attack::None, victim, Defences::ALL);
        for attack in ATTACKS {
            let got = run(attack, victim, defences);
            let ratio = got.done as f64 / equal.done as f64;
            let (us, turns) = (got.worst_ns / 1000, got.worst_turns);
            table +=
                &format!("{name:>10} {attack:>20?} {ratio:>7.3} {us:>8} us {turns:>6} turns\n");
            wrong.extend(judge(attack, name, got, equal));
        }
    }
    (wrong, table)
}

#[test]
fn attacks_leave_victims_their_share() {
    let (wrong, table) = matrix(Defences::ALL);
    println!("{table}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn each_defence_is_needed() {
    let all = Defences::ALL;
    for (name, defences) in [
        ("turns", Defences { turns: false, ..all }),
        ("memory", Defences { memory: false, ..all }),
        ("media", Defences { media: false, ..all }),
        ("limits", Defences { limits: false, ..all }),
        ("space", Defences { space: false, ..all }),
        ("latency", Defences { latency: false, ..all }),
    ] {
        let (wrong, _) = matrix(defences);
        println!("without {name}: {} cases go wrong, {:?}", wrong.len(), wrong.first());
        assert!(!wrong.is_empty(), "nothing goes wrong without {name}");
    }
}

/// The share that each of some tenants of these weights gets, with this bottleneck.
fn shares(bottleneck: Bottleneck, weights: &[u64]) -> Vec<u64> {
    let workers = if bottleneck == Bottleneck::MediaOfWorkers { weights.len() } else { 1 };
    let mut world = World::new(workers, Defences::ALL);
    let on_disk = !matches!(bottleneck, Bottleneck::Turn | Bottleneck::Memory);
    let pool = world.add_pool(on_disk);
    let mut clients = Vec::new();
    for (at, &weight) in weights.iter().enumerate() {
        let worker = if workers > 1 { at } else { 0 };
        let volume = world.add_volume(worker, pool, weight);
        // The first has many connections, the others few.
        for _ in 0..if at == 0 { 16 } else { 4 } {
            let spec = match bottleneck {
                Bottleneck::Turn => client(Kind::Read, 128, 4 * KIB),
                Bottleneck::Memory => client(Kind::SlowRead(20_000), 256, 64 * KIB),
                Bottleneck::Media | Bottleneck::MediaOfWorkers => {
                    client(Kind::Read, 64, if at.is_multiple_of(2) { 4 * KIB } else { 128 * KIB })
                }
            };
            clients.push((at, world.add_client(volume, spec)));
        }
    }
    world.run(WARM_US);
    world.forget();
    world.run(4 * MEASURE_US);
    let mut sums = vec![0; weights.len()];
    for (at, one) in clients {
        let seen = world.seen(one);
        // Memory is divided by bytes, all else by cost.
        let is_memory = bottleneck == Bottleneck::Memory;
        let cost = if is_memory { 0 } else { blockd_engine::schedule::REQUEST_COST };
        sums[at] += seen.bytes + seen.done * cost;
    }
    sums
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bottleneck {
    Turn,
    Memory,
    Media,
    MediaOfWorkers,
}

const BOTTLENECKS: [Bottleneck; 4] =
    [Bottleneck::Turn, Bottleneck::Memory, Bottleneck::Media, Bottleneck::MediaOfWorkers];

#[test]
fn two_equal_tenants_are_within_five_percent() {
    for bottleneck in BOTTLENECKS {
        let got = shares(bottleneck, &[100, 100]);
        let ratio = got[0] as f64 / got[1] as f64;
        println!("{bottleneck:?}: {ratio:.3}");
        assert!((0.95..=1.05).contains(&ratio), "{bottleneck:?}: {got:?}");
    }
}

/// The share of memory by weight tests the thresholds alone: its effect on speed depends on the
/// pieces.
#[test]
fn weights_of_one_to_three_are_within_five_percent() {
    for bottleneck in [Bottleneck::Turn, Bottleneck::Media, Bottleneck::MediaOfWorkers] {
        let got = shares(bottleneck, &[100, 300]);
        let ratio = got[1] as f64 / got[0] as f64;
        println!("{bottleneck:?}: {ratio:.3}");
        assert!((2.85..=3.15).contains(&ratio), "{bottleneck:?}: {got:?}");
    }
}

#[test]
fn sixteen_tenants_have_a_jain_index_of_98_percent() {
    for bottleneck in [Bottleneck::Turn, Bottleneck::Memory, Bottleneck::Media] {
        let got = shares(bottleneck, &[DEFAULT_WEIGHT; 16]);
        let sum: f64 = got.iter().map(|&one| one as f64).sum();
        let squares: f64 = got.iter().map(|&one| (one as f64).powi(2)).sum();
        let jain = sum * sum / (got.len() as f64 * squares);
        println!("{bottleneck:?}: {jain:.4}");
        assert!(jain >= 0.98, "{bottleneck:?}: {jain} {got:?}");
    }
}

#[test]
fn everything_is_free_when_an_attacker_is_gone() {
    let mut world = World::new(1, Defences::ALL);
    let pool = world.add_pool(true);
    let volume = world.add_volume(0, pool, DEFAULT_WEIGHT);
    let attackers: Vec<usize> =
        (0..26).map(|_| world.add_client(volume, client(Kind::HalfWrite, 1, MIB))).collect();
    world.run(1000);
    let held = MEMORY - world.free(0);
    assert!(held > 0 && held <= MEMORY / 2, "{held}");
    let mut left = held;
    for one in attackers {
        let part = left.min(MIB);
        world.remove(one, part);
        left -= part;
    }
    assert_eq!(world.free(0), MEMORY);
}
