"""Teachers: an objective with a head needs a teacher whose classes are the data's."""

import jax
import pytest

from equivit import testing
from equivit.models import saved, zoo
from equivit.trained_on import TrainedOn
from equivit.training.config import get_base
from equivit.training.teachers import check_teacher_classes

SIZE = dict(width=24, num_heads=2, depth=1, patch_size=4, num_classes=3, in_channels=3, image_size=(8, 12))


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    animals, options = ("bat", "cat", "dog"), get_base("distillation")
    teacher = testing.randomise(zoo.abstract("vit_ti16", **SIZE), jax.random.key(3))
    saved.save(tmp_path / "teacher", teacher, TrainedOn(animals))
    for place in (None, str(tmp_path / "teacher"), "zoo:vit_ti16", f"timm:{tmp_path}/absent.pth"):
        options.objective.teacher = place
        check_teacher_classes(options, TrainedOn(animals))
    options.objective.teacher = str(tmp_path / "teacher")
    with pytest.raises(ValueError, match="class 0 is 'ant', in objective.teacher=.*/teacher it is 'bat'"):
        check_teacher_classes(options, TrainedOn(("ant", "bat", "cat")))
    without_head = get_base("feature_matching")
    without_head.objective.teacher = options.objective.teacher
    check_teacher_classes(without_head, TrainedOn(("ant", "bat", "cat")))
