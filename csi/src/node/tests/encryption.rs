//! Encrypted volumes: which devices get a header, which keys open them, and what is reported.

use std::collections::HashMap;
use std::path::Path;

use tonic::Code;

use super::{ID, Node, STAGING, code, file_system, keys, mount, node, spec};
use crate::capability::Mode;
use crate::error::Error;
use crate::node::encryption::{Keys, Request};
use crate::node::look;
use crate::node::testing::{HEADER, Held};
use crate::node::world::{Encryption as _, Result, Volumes as _, World};
use crate::node::{Layers, publish, stage, through};
use crate::sizes::Range;

const KEY: (&str, &str) = ("key", "the-secret-of-the-volume");
const OTHER: &str = "another-secret";

/// Does something with the volume, with the layers that a request names.
fn act<T>(
    node: &Node,
    is_encrypted: bool,
    keys: Option<&Keys>,
    act: impl FnOnce(&World<'_>) -> Result<T>,
) -> Result<T> {
    let opening = Request { keys, mount: true };
    let layers = Layers { is_encrypted, opening, ..Layers::default() };
    through(&node.world.as_world(), ID, &node.place, layers, act)
}

fn stage(node: &Node, secrets: &[(&str, &str)]) -> Result<()> {
    let (keys, spec) = (keys(secrets), spec("ext4"));
    act(node, true, Some(&keys), |world| {
        let (place, path) = (&node.place, Path::new(STAGING));
        let mode = Mode::MultiWriter;
        stage::stage(world, &stage::Request { volume: ID, place, path, mode, spec: Some(&spec) })
    })
}

fn unstage(node: &Node) -> Result<()> {
    let at = Path::new(STAGING);
    act(node, false, None, |world| stage::unstage(world, ID, &node.place, at))
}

fn refused(node: &Node, secrets: &[(&str, &str)]) -> Error {
    let error = stage(node, secrets).unwrap_err();
    for (_, key) in secrets {
        assert!(!error.to_string().contains(key) && !format!("{error:?}").contains(key));
    }
    error
}

/// Whether these keys open the volume.
fn opens(node: &Node, keys: [&str; 2]) -> [bool; 2] {
    let device = node.world.get(&node.place).unwrap().unwrap().device.expect("attached");
    keys.map(|key| {
        let key = blockd_luks::Key::new(key.into()).unwrap();
        node.world.is_key(&device, &key).unwrap()
    })
}

fn causes(node: &Node, path: &str) -> Vec<String> {
    let stats = act(node, false, None, |world| {
        let volume = world.volumes.get(&node.place)?;
        look::stats(world, ID, &node.place, Path::new(path), volume.as_ref())
    });
    stats.unwrap().causes.iter().map(|cause| cause.message.clone()).collect()
}

#[test]
fn a_device_with_any_content_is_left_alone() {
    let partitions = Held::Other("a partition table (gpt)");
    for held in [file_system("ext4"), Held::Raw, partitions] {
        let node = node(held.clone());
        let error = refused(&node, &[KEY]);
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("where luks2 is wanted; it is left as it is"));
        assert_eq!(node.world.state().volumes["csi.a"].held, held);
    }
}

#[test]
fn an_encrypted_volume_is_not_staged_without_encryption() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    unstage(&node).unwrap();
    assert_eq!(code(node.stage(Mode::MultiWriter, "ext4")), Code::FailedPrecondition);
    // Nor one that was never staged, whose label alone says so.
    let node = self::node(Held::Nothing);
    node.world.state().volumes.get_mut("csi.a").unwrap().labelled = true;
    assert_eq!(code(node.stage(Mode::MultiWriter, "ext4")), Code::FailedPrecondition);
    assert_eq!(node.world.state().volumes["csi.a"].held, Held::Nothing);
    stage(&node, &[KEY]).unwrap();
}

#[test]
fn a_new_key_that_was_not_set_is_an_error_also_while_the_volume_is_open() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    let error = refused(&node, &[("key", OTHER), ("previousKey", "no key of it")]);
    assert_eq!(error.code(), Code::Unauthenticated);
    assert_eq!(opens(&node, [OTHER, KEY.1]), [false, true]);
}

#[test]
fn no_slot_of_the_previous_key_is_left() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    // A call that was interrupted goes on beside its repeat.
    let device = node.world.get(&node.place).unwrap().unwrap().device.expect("attached");
    let twice = blockd_luks::Key::new(KEY.1.into()).unwrap();
    node.world.add_key(&device, &twice, &twice).unwrap();
    stage(&node, &[("key", OTHER), ("previousKey", KEY.1)]).unwrap();
    assert_eq!(opens(&node, [OTHER, KEY.1]), [true, false]);
}

#[test]
fn a_wrong_key_is_an_error_that_leaves_nothing_attached() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    node.world.state().volumes.get_mut("csi.a").unwrap().image.as_mut().unwrap().held =
        file_system("ext4");
    unstage(&node).unwrap();
    let error = refused(&node, &[("key", OTHER)]);
    assert_eq!(error.code(), Code::Unauthenticated);
    assert_eq!(
        error.to_string(),
        "volume default/csi.a is encrypted and secrets.key opens none of its key slots; it is left \
         as it is"
    );
    assert_eq!(node.world.state().volumes["csi.a"].minor, None);
    assert!(node.world.state().records.is_empty());
    let both = refused(&node, &[("key", OTHER), ("previousKey", "a-third")]);
    assert!(both.to_string().contains("secrets.key and secrets.previousKey opens"), "{both}");
    // A program has the device open.
    node.world.state().holders.extend(0..100);
    assert_eq!(refused(&node, &[("key", OTHER)]).code(), Code::Aborted);
    assert_eq!(causes(&node, STAGING), ["its encryption is not open: the key was refused"]);
    node.world.state().holders.clear();
    stage(&node, &[KEY]).unwrap();
    assert!(causes(&node, STAGING).is_empty());
    unstage(&node).unwrap();
    assert!(node.world.state().records.is_empty());
}

#[test]
fn a_mapping_that_was_closed_is_a_fault() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    node.world.state().mounts.clear();
    assert!(node.world.close("map-csi.a").unwrap());
    assert_eq!(causes(&node, STAGING), ["its encryption is not open"]);
}

#[test]
fn a_new_key_takes_the_place_of_the_previous_one() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    unstage(&node).unwrap();
    let both = [("key", OTHER), ("previousKey", KEY.1)];
    for _ in 0..2 {
        stage(&node, &both).unwrap();
        assert_eq!(opens(&node, [OTHER, KEY.1]), [true, false]);
    }
    unstage(&node).unwrap();
    assert_eq!(refused(&node, &[KEY]).code(), Code::Unauthenticated);
    stage(&node, &[("key", OTHER)]).unwrap();
}

#[test]
fn keys_that_cannot_be_are_refused_by_their_field() {
    let long = "x".repeat(4000);
    for (secrets, said) in [
        (vec![("key", "")], "secrets.key is empty"),
        (vec![("key", "same-one"), ("previousKey", "same-one")], "secrets.previousKey is the same"),
        (vec![("key", long.as_str()), ("previousKey", "0123456789".repeat(10).leak())], "secrets"),
    ] {
        let pair = |(name, key): &(&str, &str)| ((*name).to_owned(), (*key).to_owned());
        let error = Keys::take(&mut secrets.iter().map(pair).collect()).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        assert!(!error.contains("same-one") && !error.contains("01234"), "{error}");
    }
    assert!(Keys::take(&mut HashMap::new()).unwrap().is_none());
    let shown = format!("{:?}", keys(&[KEY, ("previousKey", OTHER)]));
    assert!(!shown.contains(KEY.1) && !shown.contains(OTHER), "{shown}");
}

#[test]
fn growth_needs_the_key_only_while_the_mapping_is_smaller() {
    let node = node(Held::Nothing);
    stage(&node, &[KEY]).unwrap();
    let target = mount("/kubelet/pods/a/mount");
    act(&node, false, None, |world| {
        let (place, staging) = (&node.place, Path::new(STAGING));
        let request =
            publish::Request { volume: ID, place, staging, target: &target, strict: false };
        publish::publish(world, &request)
    })
    .unwrap();
    let expand = |keys: Option<&Keys>| {
        act(&node, false, keys, |world| {
            look::expand(world, (ID, &node.place), &target.path, &Range::default())
        })
    };
    let before = node.world.state().volumes["csi.a"].size;
    assert_eq!(expand(None).unwrap(), before - HEADER);
    if let Some(volume) = node.world.state().volumes.get_mut("csi.a") {
        (volume.size, volume.shown) = (2 * before, 2 * before);
    }
    let error = expand(None).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(error.to_string(), "secrets.key is missing");
    let wrong = keys(&[("key", OTHER)]);
    assert_eq!(expand(Some(&wrong)).unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(expand(Some(&keys(&[KEY]))).unwrap(), 2 * before - HEADER);
    assert_eq!(expand(None).unwrap(), 2 * before - HEADER);
    // A new key that no stage has given to the volume yet.
    if let Some(volume) = node.world.state().volumes.get_mut("csi.a") {
        (volume.size, volume.shown) = (3 * before, 3 * before);
    }
    let both = keys(&[("key", OTHER), ("previousKey", KEY.1)]);
    assert_eq!(expand(Some(&both)).unwrap(), 3 * before - HEADER);
}
