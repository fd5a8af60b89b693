//! Every call at every step: the process dies before, in the middle of or after it, or the step
//! fails; then the call is repeated, or abandoned for the one that undoes it. Nothing may be left.

use std::path::{Path, PathBuf};

use super::{ID, SIZE, STAGING, keys, spec, target, wanted};
use crate::capability::Mode;
use crate::node::encryption;
use crate::node::ephemeral;
use crate::node::kata;
use crate::node::look;
use crate::node::modes::{Access, Target};
use crate::node::publish;
use crate::node::records::Place;
use crate::node::stage;
use crate::node::steps::FileSystemSpec;
use crate::node::testing::{Fake, HEADER, Held, NodeState, Stored, WRONGS, Wrong};
use crate::node::world::{Kind, Result, Volumes as _, Wanted, World};
use crate::node::{Layers, through};
use crate::pmem::Plan;
use crate::sizes::Range;

/// A call that fails this often in a row is not completed by its repeat.
const TRIES: u32 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Mount(&'static str),
    Block,
    Reader,
    Inline,
    /// The kernel's own device, whose files are mapped.
    Direct,
    /// The same as it is.
    DirectBlock,
    /// The file system is in an image, on a device of the daemon or, with usage AppDirect, of the
    /// kernel (`true`).
    Kata(bool),
    /// An image on the kernel's own device.
    InlineKata,
    /// Encrypted, mounted.
    Luks,
    /// The same as a device.
    LuksBlock,
    /// The same, mounted for reading alone.
    LuksReader,
    /// In a cell, which moves between nodes.
    Moving(&'static Self),
}

const SHAPES: [Shape; 18] = [
    Shape::Mount("ext4"),
    Shape::Mount("xfs"),
    Shape::Block,
    Shape::Reader,
    Shape::Inline,
    Shape::Direct,
    Shape::DirectBlock,
    Shape::Kata(false),
    Shape::Kata(true),
    Shape::InlineKata,
    Shape::Luks,
    Shape::LuksBlock,
    Shape::LuksReader,
    MOVING[0],
    MOVING[1],
    MOVING[2],
    MOVING[3],
    MOVING[4],
];

const MOVING: [Shape; 5] = [
    Shape::Moving(&Shape::Mount("ext4")),
    Shape::Moving(&Shape::Reader),
    Shape::Moving(&Shape::Luks),
    Shape::Moving(&Shape::LuksBlock),
    Shape::Moving(&Shape::LuksReader),
];

/// A step in the life of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Stage,
    Publish(u8),
    Write,
    Expand,
    Stats,
    Unpublish(u8),
    Unstage,
    Delete,
}

impl Shape {
    fn life(self) -> Vec<Call> {
        use Call::{Delete, Expand, Publish, Stage, Stats, Unpublish, Unstage, Write};
        match self {
            Self::Moving(shape) => shape.life(),
            Self::Mount(_)
            | Self::Block
            | Self::Direct
            | Self::DirectBlock
            | Self::Luks
            | Self::LuksBlock => vec![
                Stage,
                Publish(0),
                Write,
                Publish(1),
                Expand,
                Stats,
                Unpublish(0),
                Unpublish(1),
                Unstage,
                Stage,
                Publish(2),
                Unpublish(2),
                Unstage,
                Delete,
            ],
            // An image does not grow.
            Self::Kata(_) => vec![
                Stage,
                Publish(0),
                Write,
                Publish(1),
                Stats,
                Unpublish(0),
                Unpublish(1),
                Unstage,
                Stage,
                Publish(2),
                Unpublish(2),
                Unstage,
                Delete,
            ],
            Self::Reader | Self::LuksReader => vec![
                Stage,
                Publish(0),
                Publish(1),
                Stats,
                Unpublish(0),
                Unpublish(1),
                Unstage,
                Delete,
            ],
            Self::Inline | Self::InlineKata => vec![Publish(0), Write, Stats, Unpublish(0), Delete],
        }
    }

    fn mode(self) -> Mode {
        if self.reads() { Mode::ReaderOnly } else { Mode::MultiWriter }
    }

    fn access(self) -> Access {
        if self.is_block() { Access::Block } else { Access::Mount }
    }

    fn spec(self) -> Option<FileSystemSpec> {
        match self {
            Self::Moving(shape) => shape.spec(),
            Self::Mount(name) => Some(spec(name)),
            Self::Direct => Some(FileSystemSpec { dax: true, ..spec("ext4") }),
            Self::Reader
            | Self::Inline
            | Self::Kata(_)
            | Self::InlineKata
            | Self::Luks
            | Self::LuksReader => Some(spec("ext4")),
            Self::Block | Self::DirectBlock | Self::LuksBlock => None,
        }
    }

    /// The shape in its cell.
    fn inner(self) -> Self {
        if let Self::Moving(shape) = self { *shape } else { self }
    }

    fn is_block(self) -> bool {
        matches!(self.inner(), Self::Block | Self::DirectBlock | Self::LuksBlock)
    }

    fn is_encrypted(self) -> bool {
        matches!(self.inner(), Self::Luks | Self::LuksBlock | Self::LuksReader)
    }

    fn reads(self) -> bool {
        matches!(self.inner(), Self::Reader | Self::LuksReader)
    }

    fn has_image(self) -> bool {
        matches!(self, Self::Kata(_) | Self::InlineKata)
    }

    /// The last of three paths is published so that it can't be written.
    fn target(self, number: u8) -> Target {
        let path = format!("/kubelet/pods/{number}/mount");
        let read_only = number == 2;
        Target { read_only, ..target(&path, self.mode(), self.access()) }
    }

    fn call(self, fake: &Fake, place: &Place, call: Call) -> Result<()> {
        // Only the creating call passes the image's description.
        let makes = matches!(call, Call::Stage)
            || (self == Self::InlineKata && matches!(call, Call::Publish(_)));
        let asked = kata::ImageSpec { partition: false, app_direct: self != Self::Kata(false) };
        let image = (self.has_image() && makes).then_some(asked);
        // So is the key passed, and with the call that grows the mapping.
        let keys = (makes || call == Call::Expand).then(|| keys(&[("key", "secret")]));
        let opening = encryption::Request { keys: keys.as_ref(), mount: !self.is_block() };
        let is_encrypted = self.is_encrypted() && makes;
        let layers = Layers { image, is_encrypted, opening };
        through(&fake.as_world(), ID, place, layers, |world| self.call_in(fake, world, place, call))
    }

    fn call_in(self, fake: &Fake, world: &World<'_>, place: &Place, call: Call) -> Result<()> {
        let (path, spec) = (Path::new(STAGING), self.spec());
        match call {
            Call::Stage => {
                let spec = spec.as_ref();
                let mode = self.mode();
                stage::stage(world, &stage::Request { volume: ID, place, path, mode, spec })
            }
            Call::Publish(number) => {
                let target = &self.target(number);
                if let (Self::Inline | Self::InlineKata, Some(spec)) = (self, &spec) {
                    let pmem = Plan { is_direct: self.has_image(), ..Plan::default() };
                    let wanted = &Wanted { pmem, ..wanted(SIZE) };
                    let request = ephemeral::Request { volume: ID, place, target, spec, wanted };
                    return ephemeral::publish(world, &request);
                }
                let request =
                    publish::Request { volume: ID, place, staging: path, target, strict: false };
                publish::publish(world, &request)
            }
            Call::Write => {
                let mut state = fake.state();
                for volume in state.volumes.values_mut() {
                    let image = volume.image.as_deref_mut();
                    for held in [Some(&mut volume.held), image.map(|image| &mut image.held)] {
                        match held {
                            Some(Held::Luks(_)) => {}
                            Some(Held::FileSystem { data, .. }) => *data = true,
                            Some(held) => *held = Held::Raw,
                            None => {}
                        }
                    }
                }
                Ok(())
            }
            Call::Expand => {
                if let Some(volume) = fake.state().volumes.get_mut(&place.name) {
                    (volume.size, volume.shown) = (2 * SIZE, 2 * SIZE);
                }
                let at = self.target(1).path;
                let size = look::expand(world, (ID, place), &at, &Range::default())?;
                let wanted = 2 * SIZE - if self.is_encrypted() { HEADER } else { 0 };
                assert_eq!(size, wanted);
                let volume = &fake.state().volumes[&place.name];
                let inner = volume.image.as_deref().unwrap_or(volume);
                if let Held::FileSystem { bytes, .. } = inner.held {
                    assert_eq!(bytes, wanted);
                }
                Ok(())
            }
            Call::Stats => {
                let (volume, path) = (world.volumes.get(place)?, self.target(0).path);
                let stats = look::stats(world, ID, place, &path, volume.as_ref())?;
                assert!(stats.usage.is_some() && stats.causes.is_empty(), "{stats:?}");
                Ok(())
            }
            Call::Unpublish(number) => {
                publish::unpublish(world, ID, place, &self.target(number).path)
            }
            Call::Unstage => stage::unstage(world, ID, place, path),
            Call::Delete => world.volumes.delete(place),
        }
    }

    /// Returns the calls that undo this call and those before it. A started undo continues.
    fn undone(self, at: usize) -> Vec<Call> {
        let mut undone = Vec::new();
        for (index, call) in self.life()[..=at].iter().enumerate() {
            match call {
                Call::Stage => undone.push(Call::Unstage),
                Call::Publish(number) => undone.push(Call::Unpublish(*number)),
                Call::Unpublish(_) | Call::Unstage if index < at => {
                    undone.retain(|other| other != call);
                }
                _ => {}
            }
        }
        undone.reverse();
        undone.push(Call::Delete);
        undone
    }
}

/// The outcome of a volume's life with an injected fault.
struct Life {
    world: Fake,
    place: Place,
    shape: Shape,
    case: String,
}

impl Life {
    fn new(shape: Shape, case: String) -> Self {
        let world = Fake::default();
        let place = match shape {
            Shape::Inline | Shape::InlineKata => {
                Place { pool: "default".to_owned(), name: "csi.a".to_owned() }
            }
            Shape::Direct | Shape::DirectBlock | Shape::Kata(true) => {
                world.add_own("csi.a", SIZE, Held::Nothing)
            }
            Shape::Moving(_) => world.add_moving("csi.a", SIZE, Held::Nothing),
            _ => world.add("csi.a", SIZE, Held::Nothing),
        };
        Self { world, place, shape, case }
    }

    /// Calls until it is done.
    fn insist(&self, call: Call) {
        let mut last = None;
        for _ in 0..TRIES {
            self.world.revive();
            match self.shape.call(&self.world, &self.place, call) {
                Ok(()) => return self.check(call),
                Err(error) => last = Some(error),
            }
        }
        panic!("{}: {call:?} is not mended by its repeat: {last:?}", self.case);
    }

    /// Checks the invariants after a call that succeeded.
    fn check(&self, call: Call) {
        if let Call::Publish(number) = call {
            let target = self.shape.target(number);
            let state = self.world.state();
            let mounts: Vec<_> = state.mounts.iter().filter(|it| it.path == target.path).collect();
            assert_eq!(mounts.len(), 1, "{}: {mounts:?}", self.case);
            let cannot = target.read_only || self.shape.reads();
            assert!(mounts[0].read_only || !cannot || self.shape.is_block(), "{}", self.case);
            assert_eq!(mounts[0].dax, self.shape == Shape::Direct, "{}", self.case);
            assert_eq!(mounts[0].major == 7, self.shape.has_image(), "{}", self.case);
            let volume = |it: &Stored| match &it.image {
                Some(image) if self.shape.is_encrypted() => image.read_only,
                _ => it.read_only,
            };
            assert!(state.volumes.values().all(|it| volume(it) == self.shape.reads()));
        }
    }

    fn nothing_is_left(&self) {
        let case = &self.case;
        let state = self.world.state();
        assert!(state.mounts.is_empty(), "{case}: {:?}", state.mounts);
        assert!(state.paths.is_empty(), "{case}: {:?}", state.paths);
        assert!(state.records.is_empty(), "{case}: {:?}", state.records);
        assert!(state.volumes.is_empty(), "{case}: {:?}", state.volumes);
    }

    /// Runs the life up to the call in which something goes wrong, and says which.
    fn until_wrong(&self, at: u64, wrong: Wrong, then: Option<(u64, Wrong)>) -> Option<usize> {
        {
            let mut state = self.world.state();
            (state.wrong, state.then) = (Some((at, wrong)), then);
        }
        for (index, call) in self.shape.life().iter().enumerate() {
            let result = self.shape.call(&self.world, &self.place, *call);
            if self.world.state().steps >= at {
                if result.is_ok() {
                    self.check(*call);
                }
                return Some(index);
            }
            result.unwrap_or_else(|error| panic!("{}: {call:?}: {error}", self.case));
        }
        None
    }
}

/// Goes through all steps of a life, and the possible faults at each.
fn at_every_step(shape: Shape, then: Option<(u64, Wrong)>, finish: impl Fn(&Life, usize)) -> u64 {
    let mut cases = 0;
    for wrong in WRONGS {
        for at in 1.. {
            let case = format!("{shape:?}, {wrong:?} at step {at}, then {then:?}");
            let life = Life::new(shape, case);
            let Some(index) = life.until_wrong(at, wrong, then) else { break };
            finish(&life, index);
            cases += 1;
        }
    }
    assert!(cases > 100, "{shape:?} has {cases} cases");
    cases
}

/// The call is repeated, and all that comes after it is done.
fn go_on(life: &Life, index: usize) {
    for call in &life.shape.life()[index..] {
        life.insist(*call);
    }
    life.nothing_is_left();
}

#[test]
fn a_repeat_completes_a_call_that_failed_at_any_step() {
    let cases: u64 = SHAPES.into_iter().map(|shape| at_every_step(shape, None, go_on)).sum();
    println!("{cases} cases");
}

#[test]
fn a_repeat_completes_a_call_that_failed_twice() {
    for shape in SHAPES {
        // A life with an image is long, and made of the same steps; so is that in a cell.
        let is_long = shape.has_image() || shape.is_encrypted() || shape.inner() != shape;
        let mores: &[u64] = if is_long { &[1, 8] } else { &[1, 2, 3, 5, 8, 13] };
        for &more in mores {
            at_every_step(shape, Some((more, Wrong::DiesBefore)), go_on);
            at_every_step(shape, Some((more, Wrong::FailsAfter)), go_on);
        }
    }
}

#[test]
fn a_call_abandoned_at_any_step_is_undone() {
    for shape in SHAPES {
        at_every_step(shape, None, |life, index| {
            life.world.revive();
            for call in shape.undone(index) {
                life.insist(call);
            }
            life.nothing_is_left();
        });
    }
}

#[test]
fn a_stage_abandoned_during_mkfs_can_be_repeated_later() {
    let direct = [Shape::Direct, Shape::Kata(false), Shape::Kata(true)];
    let shapes = [Shape::Mount("ext4"), Shape::Mount("xfs"), Shape::Reader];
    let encrypted = [Shape::Luks, Shape::LuksBlock, Shape::LuksReader];
    for shape in shapes.into_iter().chain(direct).chain(encrypted).chain(MOVING) {
        at_every_step(shape, None, |life, index| {
            if index > 0 {
                return;
            }
            life.insist(Call::Unstage);
            let held = life.world.state().volumes["csi.a"].held.clone();
            assert_ne!(held, Held::Partial, "{}", life.case);
            for call in shape.life() {
                life.insist(call);
            }
            life.nothing_is_left();
        });
    }
}

#[test]
fn a_stage_that_fails_for_good_leaves_nothing() {
    let shapes = SHAPES.into_iter().filter(|shape| shape.life()[0] == Call::Stage);
    for shape in shapes {
        for wrong in [Wrong::FailsBefore, Wrong::FailsAfter] {
            let mut cases = 0;
            for at in 1.. {
                let life = Life::new(shape, format!("{shape:?}, {wrong:?} at step {at}"));
                life.world.state().wrong = Some((at, wrong));
                let result = shape.call(&life.world, &life.place, Call::Stage);
                if life.world.state().steps < at {
                    break;
                }
                // Else the kubelet undoes it.
                if result.is_err_and(|error| error.is_final()) {
                    let held = life.world.state().volumes["csi.a"].held.clone();
                    assert_ne!(held, Held::Partial, "{}", life.case);
                    life.insist(Call::Delete);
                    life.nothing_is_left();
                    cases += 1;
                }
            }
            assert!(cases > 3, "{shape:?}, {wrong:?}: {cases} cases");
        }
    }
}

#[test]
fn a_life_goes_on_after_the_machine_was_switched_off() {
    for shape in SHAPES {
        at_every_step(shape, None, |life, index| {
            life.world.reboot();
            // Everything that was up is asked for again, as kubelet does for pods that stay.
            let calls = shape.life();
            let up = shape.undone(index);
            for call in calls[..index].iter().filter(|call| match call {
                Call::Stage => up.contains(&Call::Unstage),
                Call::Publish(number) => up.contains(&Call::Unpublish(*number)),
                _ => false,
            }) {
                life.insist(*call);
            }
            go_on(life, index);
        });
    }
}

/// Uses the volume on this node, and leaves it staged.
fn use_it(life: &Life) {
    for call in [Call::Stage, Call::Publish(0), Call::Write] {
        life.insist(call);
    }
}

/// Whether the volume has what was written last.
fn has_data(life: &Life) -> bool {
    let held = |stored: &Stored| match &stored.held {
        Held::FileSystem { data, .. } => *data,
        held => *held == Held::Raw,
    };
    let state = life.world.state();
    let volume = &state.volumes["csi.a"];
    held(volume.image.as_deref().unwrap_or(volume))
}

#[test]
fn another_node_goes_on_with_a_stage_and_the_first_one_returns_without_harm() {
    for shape in MOVING {
        for late in [&[Call::Unstage, Call::Stage][..], &[Call::Stage]] {
            at_every_step(shape, None, |life, index| {
                if index > 0 {
                    return;
                }
                let first = life.world.change_node(NodeState::default());
                use_it(life);
                let second = life.world.change_node(first);
                assert!(has_data(life), "{}", life.case);
                for call in late {
                    life.insist(*call);
                    assert!(has_data(life), "{}: {call:?}", life.case);
                }
                life.insist(Call::Unstage);
                // All was done there before the node was lost: nothing is undone.
                life.world.change_node(second);
                life.insist(Call::Unpublish(0));
                life.insist(Call::Unstage);
                assert!(has_data(life), "{}", life.case);
                life.insist(Call::Delete);
                life.nothing_is_left();
            });
        }
    }
}

#[test]
fn a_stage_that_is_undone_while_its_cell_is_away_can_be_repeated_on_another_node() {
    for shape in MOVING {
        at_every_step(shape, None, |life, index| {
            if index > 0 {
                return;
            }
            life.world.reboot();
            let mut volume = life.world.state().volumes.remove("csi.a").unwrap();
            life.insist(Call::Unstage);
            volume.minor = None;
            life.world.state().volumes.insert("csi.a".to_owned(), volume);
            life.world.change_node(NodeState::default());
            for call in shape.life() {
                life.insist(call);
            }
            life.nothing_is_left();
        });
    }
}

#[test]
fn an_inline_volume_that_fails_leaves_nothing() {
    let shape = Shape::Inline;
    for wrong in [Wrong::FailsBefore, Wrong::FailsAfter] {
        for at in 1.. {
            let life = Life::new(shape, format!("{wrong:?} at step {at}"));
            let Some(index) = life.until_wrong(at, wrong, None) else { break };
            if index > 0 {
                break;
            }
            life.nothing_is_left();
        }
    }
}

fn sweep(life: &Life) {
    let records: Vec<_> = life.world.state().records.values().cloned().collect();
    for record in records {
        ephemeral::sweep(&life.world.as_world(), &record).unwrap();
    }
}

#[test]
fn an_inline_volume_of_a_pod_that_is_gone_is_swept_away() {
    at_every_step(Shape::Inline, None, |life, _| {
        life.world.reboot();
        sweep(life);
        let _ = life.world.delete(&life.place);
        life.nothing_is_left();
    });
    // The pod's folder exists: the pod comes back, and needs its data.
    let life = Life::new(Shape::Inline, "kept".to_owned());
    life.insist(Call::Publish(0));
    life.insist(Call::Write);
    life.world.reboot();
    let above = PathBuf::from("/kubelet/pods/0");
    life.world.state().paths.insert(above.clone(), Kind::Folder);
    sweep(&life);
    life.insist(Call::Publish(0));
    let held = life.world.state().volumes["csi.a"].held.clone();
    assert!(matches!(held, Held::FileSystem { data: true, .. }), "{held:?}");
    life.insist(Call::Unpublish(0));
    life.world.state().paths.remove(&above);
    life.nothing_is_left();
}
