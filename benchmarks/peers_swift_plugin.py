"""For ms-swift alone (`--external_plugins`): the image and video tokens of the tests' tokenizer."""

from swift.template.templates import qwen

from tests.assets.models import VISION_TOKENS

for kind in vars(qwen).values():
    if isinstance(kind, type) and issubclass(kind, qwen.Qwen2VLTemplate) and "image_token_id" in vars(kind):
        kind.image_token_id = VISION_TOKENS["image_token_id"]
        kind.video_token_id = VISION_TOKENS["video_token_id"]
