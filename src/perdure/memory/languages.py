"""What the words of some languages need: which of them say nothing, which deny, and which endings they lose.

Only queries lose the words that say nothing as English does: in a text, "die" and "hat" may be English. Those are
written as SQLite's tokenizer cuts them, in lower case and without accents.
"""
# ruff: noqa: RUF001 - Cyrillic letters look like Latin ones

from __future__ import annotations

import re

# In German, Spanish and Russian: articles, pronouns, prepositions, and what asks ("wie heißt", "cómo se llama", "как
# зовут").
FUNCTION_WORDS = {
    language: frozenset(words.split())
    for language, words in {
        "german": """
aber alle als am an auch auf aus bei bin bis bist da damit dann das dass dein deine dem den der des dich die dir doch du
durch ein eine einem einen einer eines er es euer fur gibt habe haben hat hatte hatten heisst ich ihm ihn ihnen ihr ihre
im in ist ja jetzt kann kannst konnen man mein meine meinem meinen meiner mich mir mit muss mussen nach nicht noch nur
oder ohne schon sein seine seit sich sie sind so soll um und uns unser unsere unserem unseren unserer unter viel viele
vom von vor wann war waren warum was wegen welche welchem welchen welcher welches wem wen wenn wer werden wessen wie
wird wo woher wohin woran zu zum zur
""",
        "spanish": """
a al algo antes aqui como con cual cuales cuando cuanta cuantas cuanto cuantos de del desde donde dos e el ella ellas
ellos en entre era es esa ese eso esta estamos estan estar este esto estoy fue ha hace han has hasta hay he la las le
les lo los llama llamas me mi mis muy nada ni no nos nosotros nuestra nuestro o os para pero por porque puede puedes
puedo que quien quienes se ser si sin sobre son soy su sus te tengo ti tiene tienen todavia tu tus un una uno unos
y ya yo
""",
        "russian": """
а без был была были было быть в вам вас ваш весь во вот все всё вы где да для до его ее её если есть еще ещё же за зовут
и из или им их к как какая какие какое какой каком какую кем ко когда кого кому которая который кто куда ли мне мой моя
мы на над нам нас наш наша наше нашего нашей не него нет ни но ну о об он она они от по под почему при с свой себя со
сколько так там то тоже тот ты у уже чего чей чем через что чтобы это этот я
""",
    }.items()
}
# What denies a sentence, in English, German, Spanish, French, Italian, Portuguese, Dutch, Russian and Polish ...
_NEGATIONS = """
no not never without don doesn didn isn aren wasn weren won t cannot unable
nicht kein keine keinem keinen keiner keines nie niemals ohne
nunca jamás sin tampoco ne n pas jamais sans non mai senza não sem niet geen nooit zonder
не нет никогда без ни нельзя nie nigdy bez
"""
NEGATIONS = frozenset(_NEGATIONS.split())
# ... and within the words of Chinese, Japanese and Korean.
NEGATION = re.compile("[不没沒无無未别別안않못없]|な[いかく]|ません|아니")
# Nouns of Russian and its relatives have a dozen endings. Three letters stay.
CYRILLIC_ENDING = re.compile(
    "(?<=[\u0400-\u04ff]{3})"
    "(?:и?[ая]ми|[иы]ми|[ое]го|[ое]му|[иы]х|[ое]в|и?[аеоя]м|и?[ая]х|[аеёиоуыэюяіїєь]?[аеёиоуыэюяіїєйь])$"
)
